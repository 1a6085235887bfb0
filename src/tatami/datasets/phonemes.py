"""The phonemes of NETtalk as articulatory features, and the way back: the nearest phoneme in angle.

A place of articulation and the position of a vowel share one unit: Labial = Front1, Dental = Front2, Alveolar = Central1,
Palatal = Central2, Velar = Back1, Glottal = Back2. "Unvoiced" is Voiced off. `+` (in "abattoir") is `w` and `a` at once.
No two phonemes have the same features. After T. J. Sejnowski and C. R. Rosenberg, "Parallel networks that learn to pronounce
English text" (1987).
"""

from __future__ import annotations

import numpy as np
import torch

FEATURES = (
    *("Labial", "Dental", "Alveolar", "Palatal", "Velar", "Glottal"),
    *("Stop", "Nasal", "Fricative", "Affricative", "Glide", "Liquid"),
    *("Voiced", "Tensed", "High", "Medium", "Low"),
    *("Silent", "Elide", "Pause", "FullStop"),
)
"""The first 21 outputs."""

STRESSES = "<>012"
"""The last 5 outputs: the stress and syllable marks, as the corpus writes them."""

FEATURES_OF = {
    # vowels
    "a": "Low Tensed Palatal",
    "A": "Medium Tensed Dental Alveolar",
    "c": "Medium Velar",
    "E": "Medium Labial Dental",
    "e": "Medium Tensed Dental",
    "I": "High Labial",
    "i": "High Tensed Labial",
    "O": "Medium Tensed Alveolar Palatal",
    "o": "Medium Tensed Glottal",
    "U": "High Velar",
    "u": "High Tensed Glottal",
    "W": "High Medium Tensed Palatal Velar",
    "x": "Medium Palatal",
    "Y": "High Tensed Labial Dental Alveolar",
    "@": "Low Dental",
    "^": "Low Alveolar",
    ":": "High Labial Dental",
    # consonants
    "b": "Voiced Labial Stop",
    "C": "Palatal Affricative",
    "D": "Voiced Dental Fricative",
    "d": "Voiced Alveolar Stop",
    "f": "Labial Fricative",
    "G": "Voiced Velar Nasal",
    "g": "Voiced Velar Stop",
    "h": "Glottal Glide",
    "J": "Voiced Palatal Affricative",
    "K": "Palatal Fricative Velar Affricative",
    "k": "Velar Stop",
    "L": "Voiced Alveolar Liquid",
    "l": "Voiced Dental Liquid",
    "M": "Voiced Dental Nasal",
    "m": "Voiced Labial Nasal",
    "N": "Voiced Palatal Nasal",
    "n": "Voiced Alveolar Nasal",
    "p": "Labial Stop",
    "Q": "Voiced Labial Velar Affricative Stop",
    "R": "Voiced Velar Liquid",
    "r": "Voiced Palatal Liquid",
    "S": "Palatal Fricative",
    "s": "Alveolar Fricative",
    "T": "Dental Fricative",
    "t": "Alveolar Stop",
    "v": "Voiced Labial Fricative",
    "w": "Voiced Labial Glide",
    "X": "Affricative Dental Alveolar",
    "y": "Voiced Palatal Glide",
    "Z": "Voiced Palatal Fricative",
    "z": "Voiced Alveolar Fricative",
    "!": "Labial Dental Affricative",
    "#": "Voiced Palatal Velar Affricative",
    "*": "Voiced Glide Labial Low Alveolar",
    "+": "Low Tensed Palatal Voiced Labial Glide",
    # silence
    "-": "Silent Elide",
    "_": "Pause Elide",
    ".": "Pause FullStop",
}
PHONEMES = "".join(FEATURES_OF)
"""All phonemes, in the order of the table; of two that are equally near, `nearest` takes the earlier."""

CODES = np.array([[feature in features.split() for feature in FEATURES] for features in FEATURES_OF.values()], dtype=np.float32)
"""`(phonemes, 21)`, in the order of `PHONEMES`."""


def nearest(features: torch.Tensor) -> torch.Tensor:
    """The phoneme whose code has the least angle to each row.

    Args:
        features: `(samples, 21)`.

    Returns:
        Indices into `PHONEMES`, int64 `(samples,)`.
    """
    directions = torch.nn.functional.normalize(torch.from_numpy(CODES).double())
    closeness = features.detach().to("cpu", torch.float64) @ directions.T
    # The length of a row changes no order. Equal angles may differ in their last bits: round them away, numpy takes the first.
    return torch.from_numpy(np.argmax(closeness.numpy().round(12), axis=1))
