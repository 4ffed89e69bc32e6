"""Ports for a pool on this machine."""

import socket

import pytest

from services.cli import supervise
from services.cli.supervise import free_ports, port_is_free
from shared.errors import FestinaError


def test_ports_in_a_row_go_round_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second, third) = free_ports(3)
    assert (second, third) == (first + 1, first + 2) and 10_000 <= first < 32_768
    tries = iter((first, second, third + 1))
    monkeypatch.setattr(supervise.random, "randrange", lambda low, high: next(tries))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", second))
        taken.listen()
        assert not port_is_free("127.0.0.1", second)
        assert free_ports(2) == range(third + 1, third + 3)


def test_no_ports_in_a_row_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "port_is_free", lambda host, port: False)
    with pytest.raises(FestinaError, match="2 free ports"):
        free_ports(2)
