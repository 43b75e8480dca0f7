"""Messages on what the ranks hold, from what each of them says: what is named, of which ranks, and in which order."""



from ddpcheck.findings.replace import replace
from ddpcheck.testing.assertions.messages import (
    ComparedItem,
    CompareOptions,
    RankValues,
    differences,
    has_nothing_to_compare,
    mismatch_message,
    usage_error,
)


def tensor_entry(draw_shape: tuple[int, ...], fingerprint: int) -> ComparedItem:
    return ComparedItem(
        "", "tensor", attributes=(("shape", str(draw_shape)), ("dtype", "float32")), fingerprint=fingerprint
    )


def test_the_numbers_of_a_few_groups_of_ranks_are_given_and_the_others_named() -> None:
    accounts = {rank: RankValues(CompareOptions(), (tensor_entry((3, 4), rank),)) for rank in range(8)}
    measured = {rank: (float(rank), f"up to {rank}" if rank else "") for rank in range(8)}
    message = mismatch_message([replace(item, distances=measured) for item in differences(accounts)], accounts)
    assert "Ranks 1 to 7 differ from rank 0." in message
    assert "up to 4 on rank 4" in message and "up to 3" not in message and "Less far apart: ranks 1 to 3" in message


def test_what_cannot_be_compared_comes_before_what_differs() -> None:
    held, refused = RankValues(CompareOptions(), (tensor_entry((1,), 1),)), RankValues(CompareOptions(), error="why")
    assert usage_error({3: held, 5: refused}) == "why (rank 5)"
    assert usage_error({3: held, 5: held}) == ""
    assert not has_nothing_to_compare(held) and has_nothing_to_compare(
        RankValues(CompareOptions(), (ComparedItem("", "value", "None"),))
    )
