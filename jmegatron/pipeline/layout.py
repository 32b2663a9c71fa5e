"""Which stage and chunk holds which layer (no communication, numpy only).

With p stages and v chunks a stage, chunk c of stage r is number c * p + r on the path through the model, and each chunk
on that path holds the next layers: chunk c of stage r owns the L / (p v) layers from c L / v + r L / (p v) on, where
all are equally long (arXiv:2104.04473 section 2.2). The rules, and the messages about what breaks one, are those of
`jmegatron.config.layer_split`, so that a config is refused before any device is touched.

Reference: `get_num_layers_to_build` (core/transformer/transformer_block.py), `get_transformer_layer_offset`
(transformer_layer.py), `pipeline_parallel_layer_layout.py`.
"""

import dataclasses

import numpy as np

from jmegatron.config.layer_split import LayerSplit, chunk_lengths


@dataclasses.dataclass(frozen=True)
class PipelineLayout:
    """The layers of each chunk of each stage.

    Attributes:
        num_stages: Length p of the pipeline.
        num_chunks: Chunks v a stage.
        layers: Global layer numbers by [stage][chunk], ascending; a chunk may be empty.
    """

    num_stages: int
    num_chunks: int
    layers: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_layers(self) -> int:
        """Layers of all chunks."""
        return sum(len(chunk) for stage in self.layers for chunk in stage)

    @property
    def layers_per_chunk(self) -> int:
        """The largest number of layers in any chunk."""
        return max(len(chunk) for stage in self.layers for chunk in stage)

    @property
    def is_even(self) -> bool:
        """Whether all chunks are equally long."""
        return all(len(chunk) == self.layers_per_chunk for stage in self.layers for chunk in stage)

    def places(self) -> np.ndarray:
        """Returns the layer at each place of the stacked parameters.

        Returns:
            int32 [num_chunks, num_stages * layers_per_chunk]: in row c, the columns from r * layers_per_chunk on hold
            the layers of chunk c of stage r; the rest of that block is -1 (padding).
        """
        places = np.full((self.num_chunks, self.num_stages, self.layers_per_chunk), -1, np.int32)
        for stage, chunks in enumerate(self.layers):
            for chunk, layers in enumerate(chunks):
                places[chunk, stage, : len(layers)] = layers
        return places.reshape(self.num_chunks, -1)


def even_layout(num_layers: int, num_stages: int, num_chunks: int = 1) -> PipelineLayout:
    """Returns the layout with equally long chunks.

    Raises:
        ConfigError: The layers cannot be divided over stages and chunks.
    """
    return pipeline_layout(num_layers, num_stages, num_chunks=num_chunks)


def parse_layout(text: str, num_layers: int, num_stages: int) -> PipelineLayout:
    """Returns the layout that Megatron's string describes, such as `Et*3|(tt|)*29L`.

    Args:
        text: Entries separated by |, each of the letters E (embedding), t (layer) and L (loss); x*n repeats a letter,
            (...)*n a group; commas and white space do not count. Entry k is chunk k // p of stage k % p. E and L cost
            no place: embedding and output layer are divided over all stages.
        num_layers: Layers of the model, as many as the string must place.
        num_stages: p, of which the number of entries must be a multiple.

    Raises:
        ConfigError: The string cannot be read, or does not fit the numbers.
    """
    return pipeline_layout(num_layers, num_stages, layout=text)


def pipeline_layout(
    num_layers: int,
    num_stages: int,
    *,
    num_chunks: int | None = None,
    layers_per_virtual_stage: int | None = None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    layout: str | None = None,
) -> PipelineLayout:
    """Returns the layout that the options describe, every layer in exactly one chunk.

    Args:
        num_layers: Layers of the model.
        num_stages: Length p of the pipeline.
        num_chunks: Chunks v a stage; 1 means that stages are not cut further.
        layers_per_virtual_stage: Layers of one chunk, instead of their number.
        first_stage_layers: Layers of the first stage over all its chunks; the other stages share the rest evenly.
        last_stage_layers: The same for the last stage.
        account_for_embedding: The embedding takes the place of one layer in the first chunk.
        account_for_loss: The output layer takes the place of one layer in the last chunk.
        layout: Megatron's layout string, see `parse_layout`; instead of all other options.

    Raises:
        ConfigError: The layers do not fit, or two options exclude each other; the message names the numbers and changes
            that do fit.
    """
    lengths = chunk_lengths(
        LayerSplit(
            num_layers=num_layers,
            num_stages=num_stages,
            num_chunks=num_chunks,
            layers_per_virtual_stage=layers_per_virtual_stage,
            first_stage_layers=first_stage_layers,
            last_stage_layers=last_stage_layers,
            account_for_embedding=account_for_embedding,
            account_for_loss=account_for_loss,
            layout=layout,
        )
    )
    chunks = len(lengths[0])
    layers: list[list[tuple[int, ...]]] = [[] for _ in range(num_stages)]
    start = 0
    for chunk in range(chunks):
        for stage in range(num_stages):
            end = start + lengths[stage][chunk]
            layers[stage].append(tuple(range(start, end)))
            start = end
    assert start == num_layers, (start, num_layers)
    return PipelineLayout(num_stages, chunks, tuple(tuple(stage) for stage in layers))
