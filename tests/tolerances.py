"""Every tolerance of the tests, with its reason. Nothing here is loosened to make a test pass."""

LOSS_RELATIVE = 1e-5
"""P1, P2: fp32 loss against one device or the reference, relative."""
GRADIENT_RELATIVE = 1e-4
"""P1, P2: max-abs difference over max-abs of each fp32 gradient leaf."""
LOGITS_ABSOLUTE = 1e-5
"""P2: fp32 logits, absolute after division by the largest logit."""
LAYER_RELATIVE = 1e-5
"""One layer against its dense formula, forward and backward, max-abs over max-abs in fp32."""
MATMUL_FLOPS_RATIO = 1.02
"""P4: executed over theoretical matmul FLOPs."""
LEARNING_RATE_RELATIVE = 1e-5
"""fp32 learning rate against the reference's float64: cos of an fp32 angle, relative to a rate that decays tenfold."""
TRAINED_WEIGHTS_ABSOLUTE = 2e-4
"""P2: weights after 20 AdamW steps at 2e-3. Adam divides by the gradient's own size, so that an element whose gradient
is rounding noise may move by up to a tenth of a step in either direction."""
