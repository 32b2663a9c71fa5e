"""Every tolerance of the tests, with its reason. Nothing here is loosened to make a test pass."""

LOSS_RELATIVE = 1e-5
"""P1, P2: fp32 loss against one device or the reference, relative."""
RESUMED_LOSS_RELATIVE = 1e-6
"""Loss of the next step after a restart on another mesh: the same weights, bit for bit, and one forward in fp32."""
GRADIENT_RELATIVE = 1e-4
"""P1, P2: max-abs difference over max-abs of each fp32 gradient leaf."""
LOGITS_ABSOLUTE = 1e-5
"""P2: fp32 logits, absolute after division by the largest logit."""
LAYER_RELATIVE = 1e-5
"""One layer against its dense formula, forward and backward, max-abs over max-abs in fp32."""
MATMUL_FLOPS_RATIO = 1.02
"""P4: executed over theoretical matmul FLOPs."""
LEARNING_RATE_RELATIVE = 1e-6
"""fp32 learning rate and weight decay against the reference's float64: a dozen roundings of 6e-8."""
TRAINED_WEIGHTS_ABSOLUTE = 2e-5
"""P2: weights after 20 AdamW steps at 2e-3. Adam divides by the gradient's own size, so that an element whose gradient
is small may carry its rounding into the step: 1 % of one step is allowed (seen: 3e-7)."""
BF16_RELATIVE = 2e-2
"""bfloat16 against fp32 on the same rounded inputs, max-abs over max-abs: 8 bits of mantissa (4e-3) rounded a few times
on the way (logits, their gradient, the result)."""
EXPERT_FLOPS_RATIO = 1.05
"""P4: executed over theoretical matmul FLOPs of a mixture of experts with even loads."""
EXPERT_BYTES_RATIO = 1.05
"""P4: bytes that the exchange of tokens puts in over tokens x k x hidden, in each direction."""
