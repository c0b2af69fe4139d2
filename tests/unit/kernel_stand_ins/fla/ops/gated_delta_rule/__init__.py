"""The gated delta rule token by token, in plain PyTorch, with the arguments of flash-linear-attention's kernel."""

import torch


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Return [B, S, value heads, V]; with `cu_seqlens` of one row alone the state begins anew at each of them."""
    assert initial_state is None and not output_final_state
    assert cu_seqlens is None or len(q) == 1, "bounds are of one row"
    begins = {0} if cu_seqlens is None else {*cu_seqlens.tolist()}
    q, k = (part.repeat_interleave(v.size(2) // part.size(2), dim=2) for part in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q = q * (scale or q.size(-1) ** -0.5)
    results, state = [], None
    for token in range(q.size(1)):
        if token in begins:
            state = q.new_zeros(q.size(0), q.size(2), k.size(-1), v.size(-1))
        assert state is not None
        state = state * g[:, token, :, None, None].exp()
        seen = torch.einsum("bhkv,bhk->bhv", state, k[:, token])
        change = (v[:, token] - seen) * beta[:, token, :, None]
        state = state + k[:, token, :, :, None] * change[:, :, None]
        results.append(torch.einsum("bhkv,bhk->bhv", state, q[:, token]))
    return torch.stack(results, dim=1).to(v.dtype), None


fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
