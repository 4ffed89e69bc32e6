"""All figures of the paper, by name, and the document that is made of them."""

from collections.abc import Sequence

from sim.cells import Cell
from sim.page import Section
from sim.paper import ablation, courses, facts, head_to_head, pooling
from sim.paper.entry import Figure, Results, Scale

FIGURES = (
    Figure("table1", "what each system does", facts.show_systems),
    Figure("fig1", "clocks of GPUs that nobody governs", courses.show_clocks, courses.cells_clocks),
    Figure("fig2", "slack of three co-located models", courses.show_slack, courses.cells_slack),
    Figure("fig7", "error of predicted output lengths", facts.show_predictor),
    Figure(
        "fig10", "with Fig. 11: energy and attainment, all systems", head_to_head.show, head_to_head.cells
    ),
    Figure("fig10-trace", "clocks while the load moves", courses.show_trace, courses.cells_trace),
    Figure("fig12", "longer inputs, longer outputs", head_to_head.show_longer, head_to_head.cells_longer),
    Figure("fig13", "energy by stage", ablation.show, ablation.cells),
    Figure("fig14", "prefill and decode apart", ablation.show_apart, ablation.cells_apart),
    Figure("fig15", "slack with a large model", courses.show_large, courses.cells_large),
    Figure("fig16", "the safety margin", ablation.show_margin, ablation.cells_margin),
    Figure("table3", "time of a decision", facts.show_overheads),
    Figure("appendix-c", "energy wasted by frequency mismatch", facts.show_mismatch),
    Figure("appendix-h", "energy of a migration", facts.show_migration),
    Figure("aegaeon", "the second seed: pooling by tokens", pooling.show, pooling.cells),
)
NAMES = tuple(figure.name for figure in FIGURES)


def cells(figures: Sequence[Figure], scale: Scale) -> list[Cell]:
    """Return all that these figures play."""
    return [cell for figure in figures for cell in figure.cells(scale)]


def sections(figures: Sequence[Figure], results: Results, scale: Scale) -> list[Section]:
    """Return the document's sections."""
    return [figure.show(results, scale) for figure in figures]
