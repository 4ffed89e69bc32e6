"""The subject map: complete, unambiguous, and readable by those it names."""

import pytest

from shared import events as ev
from shared.subjects import COMMAND_LINE, ROUTES, SERVICES, Reads, subject_of, subscriptions


def message_types() -> list[type[ev.Message]]:
    return list(ev.Message.__subclasses__())


def test_every_message_has_a_route_and_every_subject_is_its_own() -> None:
    assert set(message_types()) == set(ROUTES)
    subjects = [route.subject for route in ROUTES.values()]
    assert len(set(subjects)) == len(subjects)


@pytest.mark.parametrize("message_type", message_types())
def test_subjects_follow_the_convention(message_type: type[ev.Message]) -> None:
    product, version, kind, noun, ident, verb = ROUTES[message_type].subject.split(".")
    assert (product, version) == ("festina", "v1")
    assert kind in {"cmd", "evt"}
    assert noun and verb and (ident == "{id}" or ident.isalpha())


@pytest.mark.parametrize("message_type", message_types())
def test_writers_and_readers_are_services(message_type: type[ev.Message]) -> None:
    route = ROUTES[message_type]
    assert route.writer in (*SERVICES, COMMAND_LINE)
    assert set(route.readers) and set(route.readers) <= set(SERVICES)


def test_a_dot_in_an_id_does_not_split_the_subject() -> None:
    assert subject_of(ev.ScaleOut, "Llama-3.1 8B") == "festina.v1.cmd.model.llama-3-1-8b.scale_out"


def test_a_reader_subscribes_to_what_a_writer_sends_it() -> None:
    for message_type, route in ROUTES.items():
        sent = subject_of(message_type, "gpu.7")
        for reader, reads in route.readers.items():
            found = [s for s, _, t in subscriptions(reader, "gpu.7") if t is message_type]
            assert len(found) == 1
            pattern = found[0].replace("*", sent.split(".")[4])
            assert pattern == sent
            strangers = [s for s, _, t in subscriptions(reader, "gpu.8") if t is message_type]
            assert (strangers[0] == found[0]) == (reads is not Reads.OWN)
