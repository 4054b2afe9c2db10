"""Wrong implementations, to judge the judge: each is the reference with one mistake that somebody would make."""

from judge.mutants import alphas, edges, learning, maps, merging

CHAPTERS = {
    "Maps, masks and temperature": maps.MUTANTS,
    "Alphas, plans and the gram form": alphas.MUTANTS,
    "Merging and bounds": merging.MUTANTS,
    "Loss, gradients, layers and tokens": learning.MUTANTS,
    "Edges: state, thresholds, scales and sizes": edges.MUTANTS,
}
MUTANTS = tuple(mutant for mutants in CHAPTERS.values() for mutant in mutants)
