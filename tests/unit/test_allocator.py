"""How PyTorch allocates memory, unless the user says otherwise."""

import pytest

from toolkit.launch import variables
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
    monkeypatch.setattr(variables, "apply_env", lambda *_: order.append("apply_env"))
    monkeypatch.setattr(startup.environment, "check_port", lambda _: order.append("check_port"))
    monkeypatch.setattr(startup, "set_allocator", lambda environ: order.append("set_allocator"))
    monkeypatch.setattr(startup.native_ops, "check_build_locks", lambda environ: None)
    cfg = startup.schema.RunConfig(launch=startup.schema.LaunchConfig(env={"A": "b"}))
    startup.set_environment(cfg, startup.environment.detect({}), {})
    assert order == ["apply_env", "set_allocator", "check_port"]
