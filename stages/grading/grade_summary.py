"""Grades of answers in a cell, apart from grading: who reads them depends on no grader."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GradeSummary:
    """How many of one or more answers were graded and are right."""

    graded: int
    correct: int
    accuracy: float  # the share of right ones
    how: str  # the method
