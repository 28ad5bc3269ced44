"""The page's server over real HTTP: one rater or many, hostile texts, hostile sites."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from review_rows import opened, packed, sample_row, write_samples

from eval.errors import UsageError
from eval.review import web
from eval.review.commands import make_pack
from eval.review.pack import Pack
from eval.review.ratings import ratings_path, read_all, read_history
from eval.review.web import serving


@contextmanager
def served(pack: Pack, rater: str | None = None) -> Iterator[httpx.Client]:
    with serving(pack, rater) as address, httpx.Client(base_url=address, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return opened(packed(tmp_path_factory.mktemp("web")))[0]


@pytest.fixture(scope="module")
def client(pack: Pack) -> Iterator[httpx.Client]:
    with served(pack) as client:
        yield client


def rate(client: httpx.Client, rater: str, item: str, **rating: Any) -> httpx.Response:
    body = {"rater": rater, "item": item, "rating": {"choice": "a", **rating}}
    return client.post("/api/ratings", json=body)


def test_only_this_machine_can_reach_it() -> None:
    listener = web.bind(0)
    assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(UsageError, match="pass another --port"):
        web.bind(listener.getsockname()[1])
    listener.close()


def test_a_rating_is_on_disk_when_it_is_answered(pack: Pack, client: httpx.Client) -> None:
    begun = client.post("/api/begin", json={"rater": "Ann"}).json()
    assert sorted(begun["order"]) == sorted(pack.items)
    assert begun["ratings"] == {}
    first = begun["order"][0]
    reply = rate(client, "Ann", first, critical=["b"], note="hm", seconds=2.5).json()
    assert reply["ratings"][first] == {
        "choice": "a", "critical": ["b"], "note": "hm", "seconds": 2.5
    }  # fmt: skip
    assert read_history(pack, "Ann").current[first].note == "hm"
    assert client.post("/api/begin", json={"rater": "Ann"}).json()["ratings"].keys() == {first}
    undone = client.post("/api/undo", json={"rater": "Ann"}).json()
    assert (undone["item"], undone["ratings"], undone["can_undo"]) == (first, {}, False)
    assert client.post("/api/undo", json={"rater": "Ann"}).json()["item"] is None


def test_raters_do_not_see_each_other(pack: Pack, client: httpx.Client) -> None:
    item = next(iter(pack.items))
    rate(client, "Bob", item)
    rate(client, "\u674e\u96f7", item, choice="b")
    assert client.post("/api/begin", json={"rater": "Cid"}).json()["ratings"] == {}
    found = {h.rater: h.current[item].choice for h in read_all(pack) if item in h.current}
    assert found == {"Bob": "a", "\u674e\u96f7": "b"}


def test_nothing_that_is_sent_names_a_model(pack: Pack, client: httpx.Client) -> None:
    item = next(iter(pack.items))
    texts = [client.get(p).text for p in ("/api/pack", f"/api/items/{item}", "/page.js", "/")]
    texts.append(client.post("/api/begin", json={"rater": "Eve"}).text)
    for text in texts:
        for word in ("candidate", "planted", "weight", "row-0"):
            assert word not in text
    assert client.get(f"/api/items/{item}").json().keys() == {"id", "messages", "a", "b"}


def test_declared_tools_are_shown(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "refund", "parameters": {}}}
    rows = [sample_row(n, tools=[tool]) for n in range(60)]
    folder = write_samples(tmp_path / "evaluation", rows)
    made = make_pack(folder, tmp_path / "p", count=20, seed=0, redact=True)
    pack = opened(made)[0]
    with served(pack) as client:
        messages = client.get(f"/api/items/{next(iter(pack.items))}").json()["messages"]
    assert [m["role"] for m in messages] == ["tools", "system", "user"]
    assert json.loads(messages[0]["text"]) == tool


def test_the_page_has_no_outside_reference(client: httpx.Client) -> None:
    for path in ("/", "/page.css", "/page.js"):
        reply = client.get(path)
        assert reply.status_code == 200
        assert "http://" not in reply.text
        assert "https://" not in reply.text
        assert "innerHTML" not in reply.text
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(("headers", "status"), [
    ({"Host": "evil.example"}, 400),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Content-Type": "text/plain"}, 422),
])  # fmt: skip
def test_other_sites_are_refused(
    pack: Pack, client: httpx.Client, headers: dict[str, str], status: int
) -> None:
    item = next(iter(pack.items))
    body = f'{{"rater": "Mallory", "item": "{item}", "rating": {{"choice": "a"}}}}'
    reply = client.post(
        "/api/ratings", content=body, headers={"Content-Type": "application/json", **headers}
    )
    assert reply.status_code == status
    assert not ratings_path(pack, "Mallory").exists()


@pytest.mark.parametrize(("changes", "status"), [
    ({"item": "999"}, 400),
    ({"rater": ""}, 400),
    ({"rater": "x" * 41}, 400),
    ({"rating": {"choice": "c"}}, 422),
    ({"rating": {"choice": "a", "critical": ["c"]}}, 422),
    ({"rating": {"choice": "a", "note": "x" * 2001}}, 422),
    ({"rating": {"choice": "a", "seconds": -1}}, 422),
    ({"rating": None}, 422),
    ({"extra": 1}, 422),
])  # fmt: skip
def test_bad_ratings_are_refused(
    pack: Pack, client: httpx.Client, changes: dict[str, Any], status: int
) -> None:
    body = {"rater": "Fay", "item": next(iter(pack.items)), "rating": {"choice": "a"}, **changes}
    assert client.post("/api/ratings", json=body).status_code == status
    assert not ratings_path(pack, "Fay").exists()


def test_unknown_paths(client: httpx.Client) -> None:
    for path in ("/api/items/999", "/api/items/..%2Fpack.json"):
        assert client.get(path).status_code in (400, 404)
    for path in ("/docs", "/openapi.json", "/pack.json", "/page.html"):
        assert client.get(path).status_code == 404


def test_a_page_for_one_rater(pack: Pack) -> None:
    with served(pack, "Gus") as client:
        assert client.get("/api/pack").json()["rater"] == "Gus"
        assert client.post("/api/begin", json={"rater": "Gus"}).status_code == 200
        refused = client.post("/api/begin", json={"rater": "Hal"})
        assert refused.status_code == 400
        assert "restart without --rater" in refused.json()["error"]


def test_a_changed_file_is_said_and_not_written_to(tmp_path: Path) -> None:
    pack = opened(packed(tmp_path))[0]
    first, second, third = list(pack.items)[:3]
    with served(pack) as client:
        rate(client, "Ann", first)
        rate(client, "Ann", second)
        path = ratings_path(pack, "Ann")
        changed = path.read_bytes().replace(b'"choice":"a"', b'"choice":"b"', 1)
        path.write_bytes(changed)
        reply = rate(client, "Ann", third)
        assert reply.status_code == 409
        assert "does not follow from the line before it" in reply.json()["error"]
        assert path.read_bytes() == changed
