"""The directions that DESIGN and CONTRIBUTING promise, read off the source."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jmegatron"
COLLECTIVES = {
    "all_gather",
    "all_to_all",
    "axis_index",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "ragged_all_to_all",
}
MAY_TALK = ("collectives.py", "context_parallel/", "moe/", "pipeline/executor.py", "optimizer/sharding.py")


def _calls(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax"):
            names.update(alias.name for alias in node.names)
    return names


def test_raw_collectives_stand_only_in_the_files_that_may_talk():
    offenders = {
        str(path.relative_to(PACKAGE)): sorted(found)
        for path in PACKAGE.rglob("*.py")
        if (found := _calls(path) & COLLECTIVES) and not str(path.relative_to(PACKAGE)).startswith(MAY_TALK)
    }
    assert offenders == {}
    assert _calls(PACKAGE / "collectives.py") & COLLECTIVES, "the search must find something"


def test_no_file_turns_off_the_replication_check_or_uses_nnx_transforms():
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
        text = path.read_text()
        keywords = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)]
        assert not [k for k in keywords if k.arg == "check_vma" and ast.unparse(k.value) != "True"], path
        for word in ("nnx.jit", "nnx.grad", "nnx.scan", "nnx.Optimizer"):
            assert word not in text, (path, word)


def test_every_module_says_what_it_is_for():
    missing = [str(p) for p in PACKAGE.rglob("*.py") if not ast.get_docstring(ast.parse(p.read_text()))]
    assert missing == []


def test_imports_point_downwards():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
