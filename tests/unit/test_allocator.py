"""How PyTorch allocates memory, unless the user says otherwise."""

import pytest

from toolkit.train import startup

GPU, CPU = {"DS_ACCELERATOR": "cuda"}, {"DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize(
    ("environ", "added"),
    [
        (GPU, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (CPU, {"THP_MEM_ALLOC_ENABLE": "1"}),
        (CPU | {"THP_MEM_ALLOC_ENABLE": "0"}, {}),
        ({"DS_ACCELERATOR": "npu"}, {}),
        (GPU | {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        (GPU | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, {}),
    ],
)
def test_a_variable_of_the_user_stays(environ: dict[str, str], added: dict[str, str]) -> None:
    found = dict(environ)
    startup.set_allocator(found)
    assert found == environ | added


def test_the_recipe_counts_as_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """launch.env is applied first."""
    order: list[str] = []
    for name in ("apply_env", "check_port"):
        monkeypatch.setattr(startup.environment, name, lambda *_, name=name: order.append(name))
    monkeypatch.setattr(startup, "set_allocator", lambda environ: order.append("set_allocator"))
    monkeypatch.setattr(startup.preflight, "check_build_locks", lambda environ: None)
    startup.set_environment(startup.schema.RunConfig(), startup.environment.detect({}), {})
    assert order == ["apply_env", "set_allocator", "check_port"]
