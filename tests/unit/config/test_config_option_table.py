"""The option table in configs/README.md is what the dataclasses say."""

import importlib.util
from pathlib import Path

from jmegatron.config.options import options

ROOT = Path(__file__).parents[3]


def _script():
    spec = importlib.util.spec_from_file_location("make_option_table", ROOT / "scripts" / "make_option_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_option_table_is_up_to_date():
    assert _script().main(["--check"]) == 0, "run python scripts/make_option_table.py"


def test_a_stale_table_is_found_and_rewritten(tmp_path, capsys):
    script = _script()
    script.README = tmp_path / "README.md"
    script.README.write_text(f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n")
    assert script.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    text = script.README.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert all(f"| `{name}` |" in text for name in options())
