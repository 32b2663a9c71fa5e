"""Which experts a router chooses and how it weighs them, against numbers and formulas of the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmegatron.moe.router import RouterSettings, choose, route, updated_bias

LOGITS = jnp.array([[1.2, 0.4, -0.3, 0.1]])


def chosen(logits=LOGITS, bias=None, **settings):
    experts, weights = choose(logits, RouterSettings(logits.shape[1], **settings), bias)
    return np.asarray(experts), np.asarray(weights)


@pytest.mark.parametrize(("pre_softmax", "wanted"), [(False, [0.6900, 0.3100]), (True, [0.4987, 0.2241])])
def test_softmax_after_or_before_the_choice(pre_softmax, wanted):
    experts, weights = chosen(pre_softmax=pre_softmax)
    np.testing.assert_array_equal(experts, [[0, 1]])
    np.testing.assert_allclose(weights, [wanted], atol=5e-5)


@pytest.mark.parametrize(("pre_softmax", "learns"), [(False, False), (True, True)])
def test_one_expert_a_token_teaches_the_router_only_with_pre_softmax(pre_softmax, learns):
    settings = RouterSettings(4, top_k=1, pre_softmax=pre_softmax)
    gradient = jax.grad(lambda logits: choose(logits, settings)[1].sum())(LOGITS)
    assert bool(np.abs(gradient).max() > 0.1) == learns


def test_a_bias_chooses_and_does_not_weigh():
    experts, weights = chosen(bias=jnp.array([0.0, -1.0, 1.0, 0.0]), score_function="sigmoid")
    scores = 1 / (1 + np.exp(-np.asarray(LOGITS[0])))
    np.testing.assert_array_equal(experts, [[2, 0]])
    np.testing.assert_allclose(weights[0], scores[[2, 0]] / scores[[2, 0]].sum(), rtol=1e-6)


def test_one_sigmoid_is_not_normalised_and_the_factor_multiplies_it():
    _, weights = chosen(top_k=1, score_function="sigmoid", scaling_factor=2.5)
    np.testing.assert_allclose(weights, [[2.5 / (1 + np.exp(-1.2))]], rtol=1e-6)


@pytest.mark.parametrize("level", [-20.0, -45.0, -60.0])
def test_sigmoids_that_are_nearly_zero_have_the_gradient_of_their_quotient(level):
    """In fp32 the square of their sum is zero; numpy's float64 has no such end."""
    logits = np.array([[level, level + 1.0, level - 3.0]])
    weigh = np.array([1.0, -2.0])
    settings = RouterSettings(3, score_function="sigmoid")
    got = jax.grad(lambda x: (choose(x, settings)[1] * weigh).sum())(jnp.asarray(logits, jnp.float32))
    x = logits[0, [1, 0]]
    scores = 1 / (1 + np.exp(-x))
    total = scores.sum() + 1e-20
    wanted = (weigh / total - (weigh * scores).sum() / total**2) * scores * (1 - scores)
    np.testing.assert_allclose(np.asarray(got)[0, [1, 0]], wanted, rtol=1e-4, atol=1e-12)
    parameters = {"kernel": jnp.asarray(logits.T, jnp.float32).T}
    loss = lambda p: route(p, jnp.ones((1, 2, 1)), RouterSettings(3, 1, "sigmoid", balancing="aux_loss")).balancing_loss  # noqa: E731
    assert np.isfinite(jax.grad(loss)(parameters)["kernel"]).all()


@pytest.mark.parametrize("number", [7, 60])
def test_an_even_load_moves_no_bias(number):
    for load in range(1, 400):
        bias = updated_bias(jnp.zeros(number), jnp.full(number, float(load)), 1e-3)
        assert not np.asarray(bias).any(), load


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_groups_limit_the_choice_to_those_whose_best_experts_score_most(score_function):
    logits = np.random.default_rng(1).normal(size=(50, 12)).astype(np.float32)
    settings = dict(top_k=4, num_groups=4, group_top_k=2, score_function=score_function)
    experts, _ = chosen(jnp.asarray(logits), **settings)
    scores = logits if score_function == "softmax" else 1 / (1 + np.exp(-logits))
    limited = 0
    for token, row in enumerate(scores):
        groups = np.argsort([-np.sort(group)[-2:].sum() for group in row.reshape(4, 3)], kind="stable")[:2]
        allowed = [expert for expert in range(12) if expert // 3 in groups]
        best = sorted(allowed, key=lambda expert: -row[expert])[:4]
        assert set(experts[token]) == set(best)
        limited += set(best) != set(np.argsort(-row)[:4])
    assert limited > 10


def test_the_bias_moves_by_the_rate_towards_the_mean_load():
    bias = updated_bias(jnp.zeros((1, 4)), jnp.array([[10.0, 2.0, 6.0, 6.0]]), 1e-3)
    np.testing.assert_allclose(bias, [[-1e-3, 1e-3, 0.0, 0.0]])


def test_losses_of_an_even_router_are_one_and_the_squared_log_of_the_experts():
    settings = RouterSettings(4, balancing="aux_loss", coefficient=1.0, z_coefficient=1.0)
    routing = route({"kernel": jnp.zeros((8, 4))}, jnp.ones((2, 6, 8)), settings)
    assert float(routing.balancing_loss) == pytest.approx(1.0)
    assert float(routing.z_loss) == pytest.approx(np.log(4) ** 2, rel=1e-6)


def test_sequences_are_balanced_one_by_one():
    """Each sequence uses two of the four experts, together they use all: even on the whole, uneven in each."""
    x = jnp.array([[[9.0, 0.0]] * 4, [[0.0, 9.0]] * 4])
    kernel = jnp.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    losses = {
        kind: float(route({"kernel": kernel}, x, RouterSettings(4, balancing=kind)).balancing_loss)
        for kind in ("aux_loss", "seq_aux_loss")
    }
    assert losses["aux_loss"] == pytest.approx(1.0, abs=1e-3)
    assert losses["seq_aux_loss"] == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize(
    "numbers", [dict(top_k=9), dict(num_groups=3, group_top_k=1), dict(num_groups=4, group_top_k=5)]
)
def test_numbers_that_do_not_fit_are_refused(numbers):
    with pytest.raises(ValueError, match="expected"):
        RouterSettings(8, **numbers)
