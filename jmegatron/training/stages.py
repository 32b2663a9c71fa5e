"""A GPT as the parts that a pipeline runs. No communication of its own.

A micro-batch is (Tokens, loss mask): the weights in Tokens are those of the objective, the mask counts for the report.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Key

from jmegatron.models.gpt import (
    ONE_STAGE,
    GPTSettings,
    PipelineParallel,
    Tokens,
    embed_parameters,
    gpt_context,
    gpt_embed,
    gpt_layer,
    gpt_output_loss,
    output_parameters,
)
from jmegatron.models.transformer import LayerParallel, SettingRun, partial_stacks, setting_runs
from jmegatron.partition import Tree
from jmegatron.pipeline.schedule import Schedule, build_schedule
from jmegatron.pipeline.stage import LayerRun, PipelineModel

Microbatch = tuple[Tokens, Any]


@dataclasses.dataclass(frozen=True)
class PipelineSettings:
    """How the stages of a pipeline are cut and in which order they work."""

    parallel: PipelineParallel = ONE_STAGE
    schedule: str = "1f1b"
    group_size: int | None = None
    """Micro-batches that go through a chunk before the next chunk follows; None: as few as serve."""
    loss_delay: int = 0
    """See `build_schedule`."""

    @property
    def num_chunks(self) -> int:
        """Chunks of a stage."""
        return max(len(self.parallel.places), 1)

    def build(self, num_microbatches: int) -> Schedule:
        """Returns the schedule of a step.

        Raises:
          ConfigError: it does not exist for this number of micro-batches.
        """
        name = "1f1b" if self.parallel.num_stages == 1 else self.schedule
        return build_schedule(
            name,
            self.parallel.num_stages,
            num_microbatches,
            self.num_chunks,
            group_size=self.group_size,
            loss_delay=self.loss_delay if self.parallel.num_stages > 1 else 0,
        )


def gpt_pipeline_model(
    settings: GPTSettings,
    parallel: LayerParallel,
    pipeline: PipelineParallel,
    dropout_key: Key[Array, ""] | None = None,
) -> PipelineModel:
    """Returns the parts of a GPT; the report holds loss_sum and num_tokens of a micro-batch."""

    def loss(parameters: Tree, y: Array, one: Microbatch) -> tuple[Array, Tree]:
        tokens, mask = one
        objective, losses = gpt_output_loss(parameters, y, tokens, settings, parallel, pipeline)
        return objective, {"loss_sum": (losses * mask).sum(), "num_tokens": mask.sum()}

    def layer_run(run: SettingRun) -> LayerRun:
        layer = lambda parameters, x, context, number: gpt_layer(  # noqa: E731
            parameters, x, context, number, run.settings, parallel, pipeline
        )
        return LayerRun(layer, run.num_layers, run.layers_per_unit)

    places = pipeline.places or (tuple(range(settings.num_layers)),)
    num_places = len(places[0]) // pipeline.num_stages
    return PipelineModel(
        embed=lambda parameters, one: gpt_embed(
            parameters, one[0], settings, parallel, pipeline, dropout_key=dropout_key
        ),
        runs=tuple(layer_run(run) for run in setting_runs(settings.settings_at(num_places))),
        loss=loss,
        context=lambda one: gpt_context(one[0], settings, parallel, dropout_key),
        embed_parameters=embed_parameters,
        layers="layers",
        loss_parameters=lambda parameters: output_parameters(parameters, settings),
        places=places,
        stacks=partial_stacks(settings.settings_at(num_places)),
    )
