"""Cross entropy over logits that are split along the vocabulary.

Megatron's own needs its global parallel state; ours takes the group as an argument and masks the columns that pad the
vocabulary to a multiple of tp.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, group, num_valid):
        scores = logits.float()
        columns = scores.shape[1]
        if num_valid < columns:
            scores = scores.clone()
            scores[:, num_valid:] = torch.finfo(scores.dtype).min
        peak = scores.max(1).values
        if group.size() > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        scores = scores - peak[:, None]
        local = labels - group.rank() * columns
        inside = (local >= 0) & (local < columns)
        local = local.clamp(0, columns - 1)
        label_score = torch.where(inside, scores.gather(1, local[:, None])[:, 0], 0.0)
        exponents = scores.exp_()
        sums = torch.stack([label_score, exponents.sum(1)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponents.div_(sums[1][:, None]), local, inside)
        ctx.logits_dtype = logits.dtype
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx, gradient):
        probabilities, local, inside = ctx.saved_tensors
        result = probabilities.clone()
        result.scatter_add_(1, local[:, None], -inside.to(result.dtype)[:, None])
        return (result * gradient[:, None]).to(ctx.logits_dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup, num_valid: int) -> Tensor:
    """Loss per token, float32.

    logits [T, V/tp] with `num_valid` real columns on this rank, labels [T] global token ids. All ranks of `group` (the
    tensor-parallel group) call it together; it all-reduces a maximum [T] and sums [2, T].
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, group, num_valid)
