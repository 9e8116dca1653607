"""Stand-ins, in plain torch, for the kernels that speculative decoding with a chain of drafts (topk = 1) calls on a
CPU.

The names and arguments are those of sgl_kernel and, for sampling, of SGLang's CUDA kernels; most write what they return
into their arguments. Trees (topk > 1) need more kernels, which the import-only stand-ins next to these refuse.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Accept = Callable[[int, int, int], bool]
"""(row, node, child) -> whether the child's token is taken after the node's."""


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: "Tensor",
    req_to_token: "Tensor",
    seq_lens: "Tensor",
    out_cache_loc: "Tensor",
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Write each request's next topk x speculative_num_steps slots, int64 [requests x slots]."""
    ends = seq_lens + topk * speculative_num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def assign_extend_cache_locs_cpu(
    req_pool_indices: "Tensor",
    req_to_token: "Tensor",
    start_offset: "Tensor",
    end_offset: "Tensor",
    out_cache_loc: "Tensor",
    pool_len: int,
) -> None:
    """Write the slots of each request's tokens start to end, one request after the other."""
    done = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[done : done + end - start] = req_to_token[row, start:end]
        done += end - start


def assign_req_to_token_pool_cpu(
    req_pool_indices: "Tensor",
    req_to_token: "Tensor",
    start_offset: "Tensor",
    end_offset: "Tensor",
    out_cache_loc: "Tensor",
    pool_len: int,
) -> None:
    """Note newly allocated slots as those of each request's tokens start to end: the reverse of the above."""
    done = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def build_tree_kernel_efficient_cpu(
    parent_list: "Tensor",
    selected_index: "Tensor",
    verified_seq_len: "Tensor",
    tree_mask: "Tensor",
    positions: "Tensor",
    retrieve_index: "Tensor",
    retrieve_next_token: "Tensor",
    retrieve_next_sibling: "Tensor",
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Describe a chain: each token's only child is the next one, and it sees itself and all before it.

    tree_mask: bool, [requests x draft_token_num x draft_token_num] elements (TreeMaskMode.QLEN_ONLY). The others:
    [requests, draft_token_num]; siblings stay -1. Raise NotImplementedError for a tree.
    """
    if topk != 1:
        raise NotImplementedError(f"the stand-in for sgl_kernel knows only chains of drafts (topk = 1), got {topk}")
    requests, width = retrieve_index.shape
    steps = retrieve_index.new_tensor(range(width))
    positions.view(requests, width).copy_(verified_seq_len.view(-1, 1) + steps)
    retrieve_index.copy_(retrieve_index.new_tensor(range(requests * width)).view(requests, width))
    retrieve_next_token[:, :-1] = steps[1:]
    seen = steps.view(1, -1) <= steps.view(-1, 1)
    tree_mask[: requests * width * width] = seen.flatten().repeat(requests)


def fill_bonus_tokens_cpu(
    accept_tokens: "Tensor", accept_lens: "Tensor", bonus_tokens: "Tensor", accept_stride: int
) -> None:
    """Write the last token that was accepted for each request: int [requests]."""
    last = accept_lens.long().view(-1, 1) - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1, accept_stride).gather(1, last).flatten())


def verify_tree_greedy_cpu(
    predicts: "Tensor",
    accept_index: "Tensor",
    accept_token_num: "Tensor",
    candidates: "Tensor",
    retrive_index: "Tensor",
    retrive_next_token: "Tensor",
    retrive_next_sibling: "Tensor",
    target_predict: "Tensor",
) -> None:
    """Accept drafts for as long as they are the target's own choices, int [requests, draft tokens]."""
    tokens, choices = candidates.tolist(), target_predict.tolist()
    tree = (retrive_index.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist())
    for row in range(len(tokens)):
        path = accepted_path(
            row, tree, accept_index.shape[1], lambda at, node, child: tokens[at][child] == choices[at][node]
        )
        _write_path(
            row, path, tokens[row], choices[row][path[-1]], predicts, accept_index, accept_token_num, tree[0][row]
        )


def tree_speculative_sampling_target_only(
    predicts: "Tensor",
    accept_index: "Tensor",
    accept_token_num: "Tensor",
    candidates: "Tensor",
    retrive_index: "Tensor",
    retrive_next_token: "Tensor",
    retrive_next_sibling: "Tensor",
    uniform_samples: "Tensor",
    uniform_samples_for_final_sampling: "Tensor",
    target_probs: "Tensor",
    draft_probs: "Tensor",
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool = True,
) -> None:
    """Sample from the target, accepting drafts with their probability under it.

    target_probs: [requests, draft tokens, vocabulary]. The algorithm is that of sgl_kernel's CUDA kernel of this name:
    draft i is accepted if its coin is at most the sum of target probabilities of the siblings tried so far, over
    threshold_acc, or if its own is at least threshold_single; the token after the accepted ones is sampled from the
    target without the rejected.
    """
    tokens, coins = candidates.tolist(), uniform_samples.tolist()
    tree = (retrive_index.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist())
    for row in range(len(tokens)):
        tried: dict[int, dict[int, float]] = {}

        def accept(at: int, node: int, child: int, tried: dict[int, dict[int, float]] = tried) -> bool:
            probability = float(target_probs[at, node, tokens[at][child]])
            rejected = tried.setdefault(node, {})
            mass = sum(rejected.values()) + probability
            if coins[at][node] <= mass / threshold_acc or probability >= threshold_single:
                return True
            rejected[tokens[at][child]] = probability
            return False

        path = accepted_path(row, tree, accept_index.shape[1], accept)
        left = target_probs[row, path[-1]].clone()
        left[list(tried.get(path[-1], {}))] = 0
        sums = left.cumsum(0)
        over = sums > uniform_samples_for_final_sampling[row] * sums[-1]
        final = int(over.nonzero()[0]) if bool(over.any()) else int(left.argmax())
        _write_path(row, path, tokens[row], final, predicts, accept_index, accept_token_num, tree[0][row])


def top_k_renorm_prob(probs: "Tensor", top_ks: "Tensor") -> "Tensor":
    """Return probabilities [rows, vocabulary] with all but the k largest of each row 0, summing to 1. top_ks: int
    [rows].
    """
    last = top_ks.long().clamp(max=probs.shape[-1]).view(-1, 1) - 1
    smallest_kept = probs.sort(-1, descending=True).values.gather(-1, last)
    kept = probs.masked_fill(probs < smallest_kept, 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: "Tensor", top_ps: "Tensor") -> "Tensor":
    """Return probabilities [rows, vocabulary] with all 0 but the fewest largest of each row that reach p, summing to
    1.
    """
    largest, order = probs.sort(-1, descending=True)
    kept = largest.masked_fill(largest.cumsum(-1) - largest > top_ps.view(-1, 1), 0)
    kept = kept.new_zeros(kept.shape).scatter(-1, order, kept)
    return kept / kept.sum(-1, keepdim=True)


def accepted_path(row: int, tree: Any, longest: int, accept: Accept) -> list[int]:
    """Return the columns of the accepted tokens of one request: 0, the token that was sampled last, then accepted
    drafts.
    """
    _, children, siblings = tree
    path = [0]
    while len(path) < longest:
        child = children[row][path[-1]]
        while child != -1 and not accept(row, path[-1], child):
            child = siblings[row][child]
        if child == -1:
            break
        path.append(child)
    return path


def _write_path(
    row: int,
    path: list[int],
    tokens: list[int],
    final: int,
    predicts: "Tensor",
    accept_index: "Tensor",
    accept_token_num: "Tensor",
    index: list[int],
) -> None:
    """Write what follows each accepted token of a request: the accepted drafts, then the target's own token."""
    for step, column in enumerate(path):
        accept_index[row, step] = index[column]
        predicts[index[column]] = tokens[path[step + 1]] if step + 1 < len(path) else final
    accept_token_num[row] = len(path) - 1


def _spans(rows: "Tensor", starts: "Tensor", ends: "Tensor") -> Any:
    return zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
