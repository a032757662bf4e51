"""Small and clear, as a test: lines per file and per function, module headers, annotations."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "contraflow").rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 400, 60


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


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
        "reasoning_gym": "envs/reasoning_gym.py",
        "vllm": "rollout/vllm_extension.py",
    }
    for module, owner in owners.items():
        users = {
            str(path.relative_to(ROOT / "contraflow"))
            for path in FILES
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == module for a in node.names))
            or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == module)
        }
        assert all(user.startswith(owner) for user in users), (module, users)
