"""Which epoch of a chain of checkpoints is best, and from which one on it overfits."""

import pytest

from stages.cells.training_records import TrainingReport, list_held_out


def make_report(parent: str, lengths: list[float | None]) -> TrainingReport:
    epochs = [
        {"loss": 1.0, "step_accuracy": [0.5], "tokens": 1, "seconds": 1.0}
        | ({"held_out": {"loss": 1.0, "accuracy": 0.5, "accept_length": x, "answers": 6}} if x else {})
        for x in lengths
    ]
    return TrainingReport.model_validate({"from": parent, "epochs": epochs, "seconds": 1.0, "weights": ""})


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ([2.0, 2.1], "best after epoch 4, 2.10 tokens a cycle"),
        ([1.9, 1.87], "best after epoch 3, 1.90 tokens a cycle; 1.87 after its last, 4: it overfits from epoch 4 on"),
        ([1.9, 1.895], "best after epoch 3, 1.90 tokens a cycle; 1.90 after its last, 4"),
    ],
)
def test_epochs_are_counted_from_the_start_of_the_chain(second: list[float | None], told: str) -> None:
    trained = {"e002": make_report("e000", [1.5, 1.8]), "e004": make_report("e002", second)}
    (curve,) = list_held_out(trained)
    assert curve.describe() == f"e004: {told}" and curve.epochs == [1, 2, 3, 4]
    assert not list(list_held_out({"e001": make_report("e000", [None])}))
