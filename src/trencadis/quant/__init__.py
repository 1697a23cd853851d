"""Quantized operands: numbers of few bits with scales, in several formats and granularities.

formats     what a number is stored as, what its scale is, and how many share one
scaled      `Scaled`, and how arrays become one and come back
grouped     the same for grouped tensors, whose groups have scales of their own
qarray      qwix's quantized arrays as `Scaled`
recipe      what a layer quantizes as it trains
product     what a product of such operands is, in products of arrays
"""

from trencadis.quant.formats import FORMATS, Format
from trencadis.quant.grouped import grouped_quantize
from trencadis.quant.recipe import Recipe
from trencadis.quant.scaled import Scaled, dequantize, quantize

__all__ = ["FORMATS", "Format", "Recipe", "Scaled", "dequantize", "grouped_quantize", "quantize"]
