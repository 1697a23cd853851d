"""Quantized operands: numbers of few bits with scales, in several formats and granularities.

formats     what a number is stored as, what its scale is, and how many share one
scaled      `Scaled`, and how arrays become one and come back
qarray      qwix's quantized arrays as `Scaled`
recipe      what a layer quantizes as it trains
product     what a product of such operands is, in products of arrays
"""

from trencadis.quant.formats import FORMATS, Format
from trencadis.quant.recipe import Recipe
from trencadis.quant.scaled import Scaled, dequantize, quantize

__all__ = ["FORMATS", "Format", "Recipe", "Scaled", "dequantize", "quantize"]
