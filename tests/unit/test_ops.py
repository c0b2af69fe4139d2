"""Which ops DeepSpeed has to compile, what that needs, and what `optim.torch = auto` makes of it."""

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.checkpoint import intact
from toolkit.config import compilers, native_ops
from toolkit.config.load import load
from toolkit.config.schema import RunConfig
from toolkit.engine import ops
from toolkit.engine.ds_config import build_ds_config
from toolkit.messages import ConfigError, LaunchError
from toolkit.train import settle, startup
from toolkit.train.run_dir import RunSource

GPU = {"DS_ACCELERATOR": "cuda", "TORCH_EXTENSIONS_DIR": "/nowhere"}
CPU = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": "/nowhere"}
AUTO = ["recipe=quickstart", "optim.torch=auto"]
NVME = ["zero=stage3_nvme", "zero.offload_optimizer.nvme_path=/nvme"]
CASES = [
    (GPU, [], [], True, "DeepSpeed's is not faster"),
    (GPU, ["optim=lion"], [], False, "there is a GPU and a compiler"),
    (GPU, ["optim=lion"], ["nvcc"], True, "nvcc not found here"),
    (CPU, [], [], True, "no GPU here"),
    (CPU, [], ["g++"], True, "no GPU here"),
    (CPU, ["optim=lion"], [], True, "no GPU here"),
    (GPU, ["zero=stage2_offload"], ["nvcc"], False, "the optimizer is offloaded"),
    (GPU, ["optim=adamw", "optim.torch=true"], [], True, ""),
    (CPU, ["optim=adamw", "optim.torch=false"], ["g++"], False, ""),
]


@pytest.mark.parametrize(("environ", "words", "lacking", "expected", "reason"), CASES)
def test_auto(
    environ: dict[str, str],
    words: list[str],
    lacking: list[str],
    expected: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_ops, "lacking_tools", lambda names, environ: lacking)
    cfg, why = native_ops.resolve_optimizer(load([*AUTO, *words]).cfg, environ)
    assert (cfg.optim.torch, why) == (expected, reason)


def test_an_op_that_is_built_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_ops, "lacking_tools", lambda names, environ: ["nvcc"] if names else [])
    (tmp_path / "fused_lion").mkdir()
    (tmp_path / "fused_lion" / "fused_lion.so").touch()
    environ = {**GPU, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    loaded = load([*AUTO, "optim=lion"])
    assert native_ops.resolve_optimizer(loaded.cfg, environ)[0].optim.torch is False
    native_ops.check_compiler(loaded, environ)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["optim.torch=false"],
            r"compile cpu_adam .* g\+\+ is missing .* \(apt install g\+\+\), or set optim.torch=true",
        ),
        (["zero=stage2_offload"], "compile cpu_adam .* or set optim.torch=true"),
        (NVME, r"compile cpu_adam, async_io .* or set optim\.torch=true zero=stage3_offload\."),
    ],
)
def test_a_compiler_that_is_missing_is_told_before_anything_is_loaded(words: list[str], told: str) -> None:
    environ = {**CPU, "CXX": "no-such-compiler"}
    native_ops.check_compiler(load(AUTO), environ)
    with pytest.raises(ConfigError, match=told):
        native_ops.check_compiler(load([*AUTO, *words]), environ)


def test_only_what_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Adam on CPUs needs no libaio, so doing without it would not help."""
    monkeypatch.setattr(native_ops, "lacking_tools", lambda names, environ: ["libaio.h"] * ("async_io" in names))
    with pytest.raises(ConfigError, match=r"compile async_io .* libaio\.h is missing .* set zero=stage3_offload\."):
        native_ops.check_compiler(load([*AUTO, *NVME]), CPU)


def test_the_choice_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ds = build_ds_config(load(AUTO).cfg, 1, 10)
    assert ds.values["optimizer"]["params"]["torch_adam"] is True
    assert ds.why["optimizer.params.torch_adam"] == "= optim.torch: auto, no GPU here"


BUILDS = """
import os, sys
from toolkit.distributed import process_group
process_group._tie_builds()
from torch.utils import cpp_extension
cpp_extension.subprocess.run(["sh", "-c", "echo $$ > " + sys.argv[1] + "; exec sleep 300"])
"""


def test_a_build_ends_with_the_rank_that_started_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    builder = subprocess.Popen([sys.executable, "-c", BUILDS, str(file)], cwd=Path(__file__).parents[2])
    until = time.monotonic() + 120
    while not file.exists() or not file.read_text().strip():
        assert time.monotonic() < until
        time.sleep(0.05)
    builder.kill()
    builder.wait()
    while Path(f"/proc/{file.read_text().strip()}").exists():
        assert time.monotonic() < until, os.kill(int(file.read_text()), 9)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("others", "before", "expected"),
    [
        ([(False, "a GPU")], None, False),
        ([(False, "a GPU"), (True, "nvcc not found")], None, True),  # one node without a compiler decides for all
        ([(False, "a GPU")], True, True),
        ([(True, "no GPU")], False, True),
    ],
)
def test_all_ranks_and_sessions_take_the_same(
    others: list[tuple[bool, str]], before: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle.process_group, "gather", lambda value: others)
    state = SimpleNamespace(config={"optim": {"torch": before}})
    monkeypatch.setattr(intact, "read_run_state", lambda checkpoint: state)
    source = RunSource(Path("run"), None if before is None else Path("step-1"))
    cfg = settle.agree_on_optimizer(load(AUTO).cfg, source)
    assert cfg.optim.torch is expected


class Builders:
    """An accelerator whose builders fail as DeepSpeed's do."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.asked = list(errors), list[str]()

    def create_op_builder(self, name: str) -> "Builders":
        self.asked.append(name)
        return self

    def load(self, verbose: bool) -> None:
        if self.errors:
            raise self.errors.pop(0)


NO_CUDA = RuntimeError("CUDA_HOME does not exist, unable to compile CUDA op(s)")
NINJA = RuntimeError("Error building extension 'fused_adam': [1/3] nvcc\nFAILED: a.o\nx.cu(1): error: no\n")


def with_ops(
    monkeypatch: pytest.MonkeyPatch, builders: Builders, *words: str, lacking: Sequence[str] = ()
) -> RunConfig:
    """Return the config after the ops are loaded, on a machine that seems to have a GPU and lacks these tools."""
    monkeypatch.setattr(ops, "get_accelerator", lambda: builders)
    for name, value in GPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native_ops, "lacking_tools", lambda names, environ=None: list(lacking))
    given = load([*AUTO, "optim=lion", *words]).cfg
    return settle.build_ops(native_ops.resolve_optimizer(given)[0], given)


@pytest.mark.parametrize(("error", "told"), [(NO_CUDA, "CUDA_HOME does not exist"), (NINJA, r"x.cu\(1\): error: no")])
def test_a_build_that_fails_is_a_warning_where_there_is_another_optimizer(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(settle, "warn", lambda line, **values: warnings.append(line.format(**values)))
    cfg = with_ops(monkeypatch, Builders(error))
    assert cfg.optim.torch is True
    assert len(warnings) == 1 and re.search(rf"fused_lion: .*{told}.* optim.torch=true is used", warnings[0])
    assert with_ops(monkeypatch, Builders()).optim.torch is False


@pytest.mark.parametrize("words", [["optim.torch=false"], ["zero=stage2_offload"]])
def test_a_build_that_fails_is_an_error_with_the_remedy_where_there_is_none(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match=r"cannot build or load \w+_lion: CUDA_HOME .*") as error:
        with_ops(monkeypatch, Builders(NO_CUDA), *words)
    assert "apt install" not in str(error.value) and "optim.torch=true" in str(error.value)
    with pytest.raises(LaunchError, match=r"apt install g\+\+.*optim.torch=true"):
        with_ops(monkeypatch, Builders(NO_CUDA), *words, lacking=["g++"])


def test_a_file_that_a_file_server_still_hides_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = ImportError("fused_adam.so: cannot open shared object file: No such file or directory")
    monkeypatch.setattr(ops.time, "sleep", lambda seconds: None)
    builders = Builders(hidden, hidden)
    assert with_ops(monkeypatch, builders).optim.torch is False
    assert builders.asked == ["FusedLionBuilder"] * 3


@pytest.mark.parametrize(
    ("words", "op"),
    [
        (["zero=stage3_zeropp", "precision=fp16"], "quantizer"),
        (["compile=deepcompile"], "dc"),
        (["zero=stage3_nvme", "zero.aio.use_gds=true"], "gds"),
    ],
)
def test_what_else_is_compiled_on_gpus(words: list[str], op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler they ended in a traceback, and a lock that a killed build left was waited for without end."""
    loaded = load([*AUTO, *words])
    assert op in native_ops.needed_ops(loaded.cfg, GPU) and op not in native_ops.needed_ops(loaded.cfg, CPU)
    assert op in native_ops.OPS and op in ops._BUILDERS
    monkeypatch.setattr(compilers, "_cuda_home", lambda environ: Path("/nowhere"))
    with pytest.raises(ConfigError, match=f"{op}.*nvcc.*=false"):
        native_ops.check_compiler(loaded, GPU)


def test_builders_of_deepspeed_have_these_names() -> None:
    for op in ("fused_adam", "fused_lion", "gds", "quantizer", "dc"):
        assert hasattr(importlib.import_module(f"deepspeed.ops.op_builder.{op}"), ops._BUILDERS[op])
    host = importlib.import_module("deepspeed.ops.op_builder.cpu")
    assert all(hasattr(host, ops._BUILDERS[name]) for name in ("cpu_adam", "cpu_lion", "async_io"))


def test_ops_of_other_machines_are_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory that nodes share: ops are compiled for one CPU, GPU, Python, PyTorch and CUDA."""
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    gpu.parent.mkdir(parents=True)

    def place(cpu: str, model: str) -> Path:
        (tmp_path / "proc/cpuinfo").write_text(f"processor : 0\nflags : {cpu}\nprocessor : 1\nflags : {cpu}\n")
        gpu.write_text(f"Model: \t {model}\nIRQ: 7\n")
        return native_ops.extensions_dir(environ, tmp_path / "proc")

    found = {place("avx2", "NVIDIA A100"), place("avx512f", "NVIDIA A100"), place("avx2", "NVIDIA H100")}
    assert place("avx2", "NVIDIA A100") in found
    monkeypatch.setattr(native_ops.sys, "abiflags", "t")
    found.add(place("avx2", "NVIDIA A100"))
    version = tmp_path / "version.py"
    monkeypatch.setattr(
        native_ops.metadata, "distribution", lambda name: SimpleNamespace(locate_file=lambda file: version)
    )
    for text in ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'", "__version__ = '2.13.0'\ncuda: x = '12.9'"):
        version.write_text(text)
        found.add(place("avx2", "NVIDIA A100"))
    assert len(found) == 6
    assert all(path.parent == tmp_path / "torch_extensions" for path in found)
    assert any("torch2.13.0-cuda13.0" in path.name for path in found)
    assert native_ops.extensions_dir({**environ, "TORCH_EXTENSIONS_DIR": "/mine"}) == Path("/mine")


@pytest.mark.parametrize(("home", "is_found"), [("cuda", True), ("runtime", False)])
def test_nvcc_is_where_pytorch_looks(
    home: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_HOME before PATH: an nvcc on PATH does not help where CUDA_HOME is a runtime alone."""
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").touch()
    monkeypatch.setattr(compilers.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert ("nvcc" not in native_ops.lacking_tools(["fused_adam"], {"CUDA_HOME": str(tmp_path / home)})) is is_found


TOOLKIT = ("cuda_runtime.h", "cusparse.h", "cublas_v2.h", "cublasLt.h", "cusolverDn.h")


@pytest.mark.parametrize(
    ("op", "files", "variables", "told"),
    [
        ("fused_adam", [f"cuda/include/{name}" for name in TOOLKIT], {}, ""),
        (
            "fused_adam",
            ["cuda/include/cuda_runtime.h"],
            {},
            "cusparse.h, cublas_v2.h, cublasLt.h, cusolverDn.h (l",
        ),
        ("fused_lion", [], {}, "cuda_runtime.h, cusparse.h"),
        ("fused_adam", [f"wheels/nvidia/cu13/include/{name}" for name in TOOLKIT], {}, "cuda_runtime.h, cusparse.h"),
        ("fused_adam", [f"math/{name}" for name in TOOLKIT], {"CPATH": "/nowhere:{}/math"}, ""),
        ("fused_adam", [f"math/{name}" for name in TOOLKIT], {"CPLUS_INCLUDE_PATH": "{}/math"}, ""),
        ("quantizer", [f"math/{name}" for name in TOOLKIT], {"CUDA_INC_PATH": "{}/math"}, ""),
        ("fused_adam", [f"cuda/targets/x86_64-linux/include/{name}" for name in TOOLKIT], {}, ""),
        ("quantizer", [f"cuda/targets/x86_64-linux/include/{name}" for name in TOOLKIT], {}, "cuda_runtime.h, "),
        ("dc", [f"cuda/include/{name}" for name in TOOLKIT], {}, "nccl.h (looked"),
        ("gds", ["cuda/include/cuda_runtime.h"], {}, "cufile.h (looked"),
    ],
)
def test_a_toolkit_without_headers_builds_nothing(
    op: str,
    files: list[str],
    variables: dict[str, str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nvcc comes alone, too, and NVIDIA has its libraries' headers elsewhere (HPC SDK). g++ does not look where nvcc
    does (conda), and nobody in wheels."""
    system = ["/usr/local/include", "/usr/include"]
    folders = compilers._include_folders
    monkeypatch.setattr(
        compilers, "_include_folders", lambda environ: [folder for folder in folders(environ) if folder not in system]
    )
    for file in ("cuda/bin/nvcc", *files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    variables = {name: value.format(tmp_path) for name, value in variables.items()}
    environ = {**GPU, "CUDA_HOME": f"{tmp_path}/cuda", **variables}
    lacking = [tool for tool in native_ops.lacking_tools([op], environ) if ".h" in tool and tool != "Python.h"]
    assert len(lacking) == bool(told)
    if told:
        assert lacking[0].startswith(told) and f"{tmp_path}/cuda/include" in lacking[0]
        assert compilers.how_to_install(lacking).endswith("or CPATH=DIRECTORY of these headers")


def test_missing_headers_are_an_error_or_another_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    monkeypatch.setattr(compilers, "_include_folders", lambda environ: [])
    environ = {**GPU, "CUDA_HOME": str(tmp_path)}
    assert native_ops.resolve_optimizer(load([*AUTO, "optim=lion"]).cfg, environ)[0].optim.torch is True
    with pytest.raises(ConfigError, match=r"fused_adam.* cusolverDn\.h \(looked in .*/include\) .*CPATH.*torch=true"):
        native_ops.check_compiler(load([*AUTO, "optim.torch=false"]), environ)


def test_what_is_missing_here_is_told_with_what_is_wrong_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(what: str) -> Callable[[object], None]:
        def check(loaded: object) -> None:
            raise ConfigError(what)

        return check

    monkeypatch.setattr(startup.native_ops, "check_compiler", missing("no compiler"))
    monkeypatch.setattr(startup.requirements, "check_tracker_packages", missing("no tracker"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError) as told:
        startup.make_ready(["recipe=quickstart", "schedule.warmup_steps=-3"])
    assert all(text in str(told.value) for text in ("schedule.warmup_steps", "no compiler", "no tracker"))


@pytest.mark.parametrize(
    ("listed", "is_kept"),
    [("8.0;9.0+PTX", True), ("8.6 9.0", True), ("9.0a", False), ("8.0;10.0f+PTX", False), ("Hopper", False)],
)
def test_gpus_are_asked_where_deepspeed_cannot_read_the_list_of_architectures(listed: str, is_kept: bool) -> None:
    """An image of CUDA for H200s sets 9.0a, which PyTorch reads."""
    builder = importlib.import_module("deepspeed.ops.op_builder.fused_adam").FusedAdamBuilder()
    builder.jit_mode, builder._jit_arch_list = True, listed
    environ = {"TORCH_CUDA_ARCH_LIST": listed}
    ops.drop_unreadable_architectures(environ)
    if is_kept:
        builder.compute_capability_args()
    else:
        with pytest.raises(ValueError, match="invalid literal for int"):
            builder.compute_capability_args()
    assert environ == ({"TORCH_CUDA_ARCH_LIST": listed} if is_kept else {})


def test_without_a_list_of_architectures_there_is_none() -> None:
    environ = dict[str, str]()
    ops.drop_unreadable_architectures(environ)
    assert environ == {}
