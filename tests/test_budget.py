"""Small and clear, as a test: lines per file and per function, module headers, annotations."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "contraflow").rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 400, 60


def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def imported(path: Path) -> set[str]:
    """The outside modules that a file imports, anywhere in it, by their first name."""
    found = nodes(path)
    names = [alias.name for node in found if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in found if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_fit_the_eye(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(path) if f.end_lineno - f.lineno >= MAX_FUNCTION}
    assert not long


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_its_job(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_each_outside_library_stays_in_its_place() -> None:
    owners: dict[str, str | tuple[str, ...]] = {
        "obstore": "blobs.py",
        "zmq": "runtime/",
        "typer": ("cli.py", "cli_cluster.py"),
        "yaml": "cluster/written.py",
        "tokenizers": "model/tokenizer.py",
        "transformers": "model/chat.py",
        "triton": ("model/kernels_", "dispatch/nvlink_kernels.py"),
        "h11": "rollout/http",
        "jinja2": "model/template.py",
        "ray": "runtime/ray.py",
        "reasoning_gym": "envs/reasoning_gym.py",
        "verifiers": "envs/verifiers_package.py",
        "vllm": "rollout/vllm_extension.py",
    }
    users: dict[str, set[str]] = {module: set() for module in owners}
    for path in FILES:
        for module in imported(path) & owners.keys():
            users[module].add(str(path.relative_to(ROOT / "contraflow")))
    for module, owner in owners.items():
        assert all(user.startswith(owner) for user in users[module]), (module, users[module])
