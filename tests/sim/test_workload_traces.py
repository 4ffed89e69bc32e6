"""Reading traces in the formats they come in, and errors that name line and column."""

import gzip
from pathlib import Path

import pytest

from shared.errors import ConfigError
from sim.traces import read_clients, read_trace


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("arrival_s,input_tokens,output_tokens\n0.5,374,44\n", (500.0, "", 374, 44)),
        ("arrival_ms,input_tokens,output_tokens,blocks\n3000,6758,500,14\n", (3000.0, "", 6758, 500)),
        (
            "Request Time,Model Name,Input Length,Output Length\n00:01:02.418,synth_model_08,168,416\n",
            (62_418.0, "synth_model_08", 168, 416),
        ),
        ("time,model,input,output\n2,Qwen3-4B,10,0\n", (2000.0, "Qwen3-4B", 10, 1)),
    ],
)
def test_formats(tmp_path: Path, text: str, expected: tuple[float, str, int, int]) -> None:
    [row] = read_trace(written(tmp_path, text))
    assert (row.at_ms, row.model, row.input_tokens, row.output_tokens) == expected


def test_dates_with_ten_millionths_and_gzip(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    path.write_bytes(gzip.compress(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}".encode()))
    first, second = read_trace(path)
    assert second.at_ms - first.at_ms == pytest.approx(4314.579, abs=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,input,output\n1,2,3\n2,abc,3\n", r"line 3, column 'input': 'abc' is not a number"),
        ("time,input,output\n1,2,3.5\n", r"line 2, column 'output': '3.5' is not a count"),
        ("time,input,output\n1,-2,3\n", r"line 2, column 'input': '-2' is not a count"),
        ("time,input,output\nsoon,2,3\n", r"line 2, column 'time': 'soon' is not a number"),
        ("time,input,output\n1,nan,3\n", r"line 2, column 'input': 'nan' is not a number"),
        ("time,input,output\n1,2\n", r"line 2: column 'output' is missing"),
        ("time,input\n1,2\n", r"line 1: no column for output: one of .*output_tokens.*It has: time, input"),
        ("time,input,output\n", "no requests below the header"),
    ],
)
def test_errors_name_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.csv cannot be read: No such file"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(ConfigError, match="name the part before _arrivals"):
        read_clients(tmp_path / "missing")


def test_the_clients_that_come_along() -> None:
    clients = read_clients()
    assert len(clients) == 32
    assert all(len(c.windows) == 6 and None not in c.windows for c in clients)
    rates = [sum(w.rate_rps for w in c.windows if w) for c in clients]
    assert rates == sorted(rates, reverse=True)
    busiest = clients[0]  # client 143 of m-large: 18 requests/s, prompts of 290 to 1,700 tokens
    assert rates[0] / 6 == pytest.approx(18.07, abs=0.01)
    assert busiest.lengths.input_tokens.mean == pytest.approx(746.7, rel=0.1)


def test_silent_windows_and_clients_without_lengths(tmp_path: Path) -> None:
    written(
        tmp_path,
        "client,window_s,rate_rps,pattern,shape\na,1200,2,Gamma,1\na,2400,1,Weibull,0.5\nb,1200,9,Gamma,1\n",
        "x_arrivals_day0.csv",
    )
    lengths = "client,field,mean,q0.1,q0.9\na,input_tokens,1,10,20\na,output_tokens,1,1,2\n"
    written(tmp_path, lengths, "x_client_lengths.csv")
    [client] = read_clients(tmp_path / "x")
    assert client.name == "a"
    assert [w and w.rate_rps for w in client.windows] == [2.0, None, 1.0]
    assert client.lengths.input_tokens.at == (0.0, 0.1, 0.9, 1.0)
    assert client.lengths.input_tokens.tokens == (10.0, 10.0, 20.0, 20.0)
