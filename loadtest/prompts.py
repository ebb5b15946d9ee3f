"""The prompts of the load tests: windows of one passage, so that they differ from the first word on.

A window of 58 words is about 64 tokens of the demo model, whatever the window; the servers' own counts are reported.
"""

from __future__ import annotations

import random

PASSAGE = """
The ferry left the harbour a little after seven, while the lamps along the quay were still burning and the gulls were
only beginning to argue. A woman in a green coat stood at the rail and counted the boats that had not gone out. Her
brother had told her that the old mill by the river would be sold before the winter, and that nobody in the town knew
who wanted it. She had laughed at first, because the roof leaked and the wheel had not turned for thirty years, but in
the night she had thought about it and had not slept well. When they were children they used to hide there from the
rain, and their father kept bees in the yard behind it. Now the captain came past with a cup of tea and said that the
weather would hold until the evening, perhaps longer. The island was a grey line, then a green one, then a row of
white houses with a church in the middle. On the pier a boy was selling bread and warm milk from a cart, and a dog
slept under the wheels. She bought a loaf, asked the boy about the road over the hill, and began to walk. The path
went up between two stone walls where small yellow flowers grew in every crack. Half way to the top she met a man who
was mending a gate with a piece of wire, and he told her that the letter she was looking for had never come to the
island at all. It had been kept at the post office on the other side, he said, because the name on it could not be
read. So she sat down on the wall beside him, broke the bread in two, and asked him to tell her everything that he
remembered about the year of the great storm, when the bridge was carried away and the school was closed until spring.
"""


def prompts(count: int, words: int = 58) -> list[str]:
    """`count` different prompts of `words` words each, the same at every call."""
    passage = PASSAGE.split()
    starts = random.Random(20).sample(range(len(passage)), count)
    return [" ".join(passage[(start + i) % len(passage)] for i in range(words)) for start in starts]
