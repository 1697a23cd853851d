"""The colours of groups: neighbours differ for every eye, and numbers can be read on them."""

from trencadis.viz.palette import HUES, LAYERS, colour, ink


def test_palette_tells_neighbours_apart():
    def luminance(group):
        r, g, b = (int(colour(group)[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * r**2.2 + 0.7152 * g**2.2 + 0.0722 * b**2.2

    period = len(HUES) * len(LAYERS)
    assert len({colour(g) for g in range(1000)}) == period
    for g in range(period):  # a ratio of contrast in brightness alone, which every eye sees
        low, high = sorted((luminance(g), luminance(g + 1)))
        assert (high + 0.05) / (low + 0.05) > 1.15, g
        letters = 1.0 if ink(g) == "#ffffff" else 0.01
        low, high = sorted((luminance(g), letters))
        assert (high + 0.05) / (low + 0.05) > 3, g
