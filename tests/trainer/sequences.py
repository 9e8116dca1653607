"""Eight sequences of unequal lengths, and batches of them with everything an update needs."""

import torch

from harness.trainer.batch import Batch, from_sequences

LENGTHS = ((3, 2), (5, 9), (1, 1), (7, 4), (2, 12), (4, 6), (9, 3), (3, 1))
"""(prompt, response) tokens of each sequence: the first and the last four hold 16 and 22 response tokens."""


def sequences() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses, token ids 2 to 319."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, 320, (count,), generator=generator).tolist()

    return [tokens(before) for before, _ in LENGTHS], [tokens(after) for _, after in LENGTHS]


def advantage_batch(prompts: list[list[int]], responses: list[list[int]], rows: slice) -> Batch:
    """These rows, with numbers that depend on the row of the whole and the position alone, not on the padding."""
    batch = from_sequences(prompts[rows], responses[rows], pad_id=0)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn((5, len(prompts), 32), generator=generator)[:, rows, : batch.input_ids.shape[1]]
    return batch.replace(
        old_log_probs=-5 + numbers[0],
        reference_log_probs=-5 + numbers[1],
        advantages=numbers[2],
        old_values=numbers[3],
        returns=numbers[4],
    )
