"""The public names: sorted, importable, and what they say they are."""

from __future__ import annotations

import aserve


def test_the_public_names_are_sorted_and_there() -> None:
    assert aserve.__all__ == sorted(aserve.__all__, key=lambda name: (name != name.upper(), name))
    for name in aserve.__all__:
        assert getattr(aserve, name) is not None
        assert name in dir(aserve)
    assert not hasattr(aserve, "nonsense")


def test_every_error_is_public() -> None:
    from aserve import errors

    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert names <= set(aserve.__all__)
