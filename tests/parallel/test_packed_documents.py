"""Documents packed into one sequence give what each gives alone, and the same on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_equal_steps, random_batch, run_gradients, start_parameters, tiny_gpt
from tolerances import LOGITS_ABSOLUTE

from jmegatron.data.borders import Borders
from jmegatron.models.gpt import GPTSettings, gpt_hidden
from jmegatron.models.transformer import LayerParallel

EOD = 0
ALL = Borders(EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
MODELS = {
    "learned": {},
    "rope": {"position": "rope", "kv_heads": 2, "normalization": "RMSNorm", "activation": "swiglu", "bias": False},
}


def states(settings: GPTSettings, tokens: list[int], **arrays):
    run = jax.jit(
        lambda p, t, a: gpt_hidden(
            p, t, jnp.zeros(1, jnp.uint32), settings, LayerParallel(), **{k: v[None] for k, v in a.items()}
        )
    )
    return np.asarray(run(start_parameters(settings, 5), np.array([tokens], np.int32), arrays)[0])


@pytest.mark.parametrize("model", MODELS)
def test_each_packed_document_gets_the_states_that_it_has_alone(model):
    settings = tiny_gpt(**MODELS[model])
    documents = [
        [5, EOD],
        [7, 8, EOD],
        [9, 9, 9],
    ]
    packed = [token for document in documents for token in document]
    borders = ALL.arrays(np.array(packed, np.int32))
    got = states(settings, packed, positions=borders["position_ids"], segments=borders["segment_ids"])
    alone = np.concatenate([states(settings, document) for document in documents])
    np.testing.assert_allclose(got, alone, rtol=0, atol=LOGITS_ABSOLUTE * np.abs(alone).max())
    # The control: without the borders, what stands before a document does change it.
    assert np.abs(states(settings, packed)[2:] - alone[2:]).max() > 0.01


def packed_batch():
    arrays = random_batch(8, 16, 29)
    # About one token in five ends a document.
    arrays["tokens"][np.random.default_rng(1).random(arrays["tokens"].shape) < 0.2] = EOD
    found = ALL.arrays(arrays["tokens"])
    return arrays | found | {"loss_mask": found["loss_mask"].astype(np.float32)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dp", "tp", "sequence_parallel", "num_microbatches"), [(2, 4, True, 2), (1, 4, False, 1)])
def test_packed_documents_on_a_mesh_equal_one_device(model, dp, tp, sequence_parallel, num_microbatches):
    settings = tiny_gpt(**MODELS[model])
    one = run_gradients(settings, packed_batch())
    got = run_gradients(
        settings,
        packed_batch(),
        dp=dp,
        tp=tp,
        sequence_parallel=sequence_parallel,
        num_microbatches=num_microbatches,
    )
    assert_equal_steps(got, one)
    assert one.loss != run_gradients(settings, random_batch(8, 16, 29)).loss
