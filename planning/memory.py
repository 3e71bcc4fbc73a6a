"""Memory of a replica, per GPU: how large may a chunk be?

    0.9 * memory >= weights + adapters + tokens * max(activation bytes + logit bytes, measured bytes)

Bytes that a layer keeps per token, without recomputation and with flash attention (no attention matrix), after
Korthikanti et al. 2022, section 4, adapted to gated MLPs and grouped queries; B = bytes per parameter:

    B * (4 * hidden + ((4 * heads + 3 * kv_heads) * head_dim + 4 * ffn) / tp)

Not split by tp, unless by sequence parallelism: inputs and outputs of both norms. Split: q, k, v, q and k with their
positions, the attention's output as it comes and as it goes on; gate, up, activated gate and their product. A fifth is
added for LoRA's rank values and the gradients under way: peaks measured on a CPU, in float32 and in bfloat16, are then
10 % below to 6 % above the model. Under the 1F1B schedule the first stage keeps up to pp chunks of layers/pp layers
each, so the number of layers whose activations are alive is num_layers for every pp. Logits count four times in
float32: themselves, the probabilities that the loss keeps, its gradient before and after the loss weights; all that
layers keep is alive then.

With recompute every layer keeps its input (B * hidden). When the logits are gone, one layer at a time has all its
activations and at most as many bytes of their gradients.

Approximations: the heaviest stage is taken to hold both embedding and logits; every adapter matrix counts as split over
tp * pp; flash attention's statistics and the less than tp tokens that sequence parallelism adds to a row fall under the
reserve.
"""

from planning.types import ActivationPolicy, ModelShape, ParallelConfig

USABLE_FRACTION = 0.9
BEYOND_KEPT = 1.2
FLOAT32_BYTES = 4
LOGIT_BYTES = 4 * FLOAT32_BYTES
ADAPTER_BYTES = 4 * FLOAT32_BYTES  # weight, gradient and two AdamW moments
KEEP_ALL = ActivationPolicy()


def max_chunk_tokens(
    shape: ModelShape,
    config: ParallelConfig,
    memory_bytes: int,
    num_adapter_parameters: int,
    measured_bytes_per_token: float = 0.0,
    activations: ActivationPolicy = KEEP_ALL,
) -> int:
    """Tokens of the largest chunk that fits on each GPU of a <tp,pp> replica; 0 when the weights alone do not fit.

    `num_adapter_parameters` counts all tenants' adapters over the whole model. A measured peak per token counts where
    it is above the modelled one.
    """
    free_bytes = (
        USABLE_FRACTION * memory_bytes
        - _weight_bytes(shape, config)
        - ADAPTER_BYTES * num_adapter_parameters / config.num_gpus
    )
    modelled = bytes_per_token(shape, config, activations)
    return max(0, int(free_bytes // max(modelled, measured_bytes_per_token)))


def _weight_bytes(shape: ModelShape, config: ParallelConfig) -> float:
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    mlp = 3 * shape.hidden_size * shape.ffn_size
    norms = 2 * shape.hidden_size
    layers = shape.num_layers / config.pp * ((attention + mlp) / config.tp + norms)
    num_embeddings = 2 if config.pp == 1 and not shape.tied_embeddings else 1
    embeddings = num_embeddings * shape.vocab_size * shape.hidden_size / config.tp
    return shape.bytes_per_parameter * (layers + embeddings)


def bytes_per_token(shape: ModelShape, config: ParallelConfig, activations: ActivationPolicy = KEEP_ALL) -> float:
    """Modelled peak of a GPU per token of a chunk, above what it holds at rest."""
    tp = config.tp
    norm_split = tp if activations.sequence_parallel else 1
    split = (4 * shape.num_heads + 3 * shape.num_kv_heads) * shape.head_dim + 4 * shape.ffn_size
    kept = shape.bytes_per_parameter * (4 * shape.hidden_size / norm_split + split / tp)
    logits = LOGIT_BYTES * shape.vocab_size / tp
    if activations.recompute:
        layer_input = shape.bytes_per_parameter * shape.hidden_size / norm_split
        return shape.num_layers * layer_input + max(2 * kept, logits)
    return shape.num_layers * BEYOND_KEPT * kept + logits
