"""A dry run's report without a compiler: closed forms of a small model, and made-up figures of a compiled step."""

from html.parser import HTMLParser

from jmegatron.config import load_config
from jmegatron.training import dry_run

SMALL_LINE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 32 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 100 --bf16 "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --dry-run --num-gpus 16"
)
SMALL = SMALL_LINE.split()

COMPILED = {
    "memory": {
        "parts": {
            "parameters": 1_000_000_007,
            "optimizer_state": 2_000_000_011,
            "gradients": 3_000_000_019,
            "gathered_parameters": 0,
            "activations": 4_000_000_007,
            "other_temporaries": 5_000_000_029,
        },
        "arguments": 3_000_000_018,
        "outputs": 3_000_000_001,
        "aliased": 3_000_000_000,
        "temporaries": 12_000_000_054,
        "state": 6_000_000_037,
        "peak": 15_000_000_073,
    },
    "collectives": [
        {
            **dry_run._collective_row(("tp",), "all-gather", True),
            "count": 3,
            "executions": 77,
            "bytes": 123456789.0,
            "link_s": 0.000274348,
        },
        {
            **dry_run._collective_row(None, "all-reduce", False),
            "count": 1,
            "executions": 1,
            "bytes": 4.0,
            "link_s": 8e-11,
        },
    ],
    "overlap": [
        {
            "axes": ["tp"],
            "kind": "all-gather",
            "beside": "matmuls",
            "hidden": True,
            "count": 3,
            "executions": 77,
            "bytes": 123456789.0,
            "link_s": 0.000274348,
        }
    ],
    "exposed": {"all-gather": 0.00123, "all-reduce": 0.0},
    "flops": {"dot": 10**12, "attention": 2 * 10**10, "attention_visible": 10**10, "uncounted": ["custom-call.7"]},
    "seconds": {"tracing": 1.25, "lowering": 0.5, "compiling": 20.125, "reading": 0.25},
    "xla_options": ["XLA options of the step: (none)"],
    "num_instructions": 4321,
    "bound": False,
}


def report_of(words=SMALL, compiled=True):
    """The report of a config, with the made-up figures or with closed forms alone."""
    config, notes = dry_run.resolve_for_dry_run(load_config(list(words)))
    result = dry_run.formula_figures(config)
    result["notes"] = [*notes, *result["notes"]]
    if compiled:
        dry_run.add_compiled(result, COMPILED)
    dry_run.judge(result)
    return result


class PageReader(HTMLParser):
    """Reads a page: its `<data>` (key, value, text), the text of table cells outside them, tags left open."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, page: str):
        super().__init__()
        self.data: list[tuple[str, str, str]] = []
        self.cells: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[list[str]] = []
        self._open: list[str] = []
        self._classes: list[str] = []
        self._value: tuple[str, str] | None = None
        self.feed(page)
        self.left_open = list(self._open)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        self.inside.append(list(self._classes))
        if tag == "data":
            self._value = (str(given["data-key"]), str(given["value"]))
        if tag not in self.VOID:
            self._open.append(tag)
            self._classes.append(str(given.get("class") or ""))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(list(self._classes))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self._classes.pop()
        if tag == "data":
            self._value = None

    def handle_data(self, text):
        if self._value is not None:
            self.data.append((*self._value, text))
        elif {"td"} & set(self._open):
            self.cells.append(text)
