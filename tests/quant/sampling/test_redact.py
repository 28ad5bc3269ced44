"""Personal data: found with valid checksums only, replaced alike within a row, once is enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant.artifact.redact import findings, iban, luhn, redact, resident_id

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc+/=\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to ann.lee+x@mail.example.co.uk.", "write to [EMAIL_1]."),
        ("邮箱wang@example.cn，电话13812345678。", "邮箱[EMAIL_1]，电话[PHONE_1]。"),
        ("座机010-62345678或0755-8234 5678", "座机[PHONE_1]或[PHONE_2]"),
        ("手机１３８１２３４５６７８", "手机[PHONE_1]"),
        ("call +49 30 901820 or (212) 555-0143", "call [PHONE_1] or [PHONE_2]"),
        ("身份证11010519491231002X已核", "身份证[ID_1]已核"),
        ("SSN 123-45-6789", "SSN [SSN_1]"),
        ("card 4111 1111 1111 1111, amex 378282246310005", "card [CARD_1], amex [CARD_2]"),
        ("to DE89 3704 0044 0532 0130 00 today", "to [IBAN_1] today"),
        ("from 203.0.113.77 and 2001:db8:0:1::17", "from [IP_1] and [IP_2]"),
        ("postgres://app:s3cret@db/x", "postgres://[CREDENTIALS_1]@db/x"),
        ("key sk-proj-abcdefghijklmnop1234", "key [SECRET_1]"),
        ("Authorization: Bearer abcdef0123456789abcdef01", "Authorization: Bearer [SECRET_1]"),
        ('"password": "hunter2hunter"', '"password": "[SECRET_1]"'),
        (f"x {KEY} y", "x [PRIVATE_KEY_1] y"),
        ("müller@example.de or john (at) example (dot) com", "[EMAIL_1] or [EMAIL_2]"),
        ("(212) 555-0143 ext. 12; Tel: 2125550143", "[PHONE_1]; Tel: [PHONE_2]"),
        ("Tel.: 030 901820, Fax 089/1234-567", "Tel.: [PHONE_1], Fax [PHONE_2]"),
        ("Tél. 01 23 45 67 89; mobile 07700 900123", "Tél. [PHONE_1]; mobile [PHONE_2]"),
        ("Facsimile No.: 020 7946 0958", "Facsimile No.: [PHONE_1]"),
        ("电话：01062345678，（010）62345678转8001", "电话：[PHONE_1]，[PHONE_2]"),
        ("0086-13812345678 or +86 138 1234 5679", "[PHONE_1] or [PHONE_2]"),
        ("passport no. E12345678", "passport no. [PASSPORT_1]"),
        ("护照号码：EJ1234567", "护照号码：[PASSPORT_1]"),
        ("身份证号：110105491231002", "身份证号：[ID_1]"),
        ("SSN: 123456789", "SSN: [SSN_1]"),
        ("Routing: 325070760 Account :676313880", "Routing: [ACCOUNT_1] Account :[ACCOUNT_2]"),
        ("账号：1202 0209 0990 0123 456", "账号：[ACCOUNT_1]"),
    ],
)
def test_what_is_personal_is_replaced(text: str, expected: str) -> None:
    clean, counts = redact({"text": text})
    assert clean["text"] == expected
    assert sum(counts.values()) == expected.count("_1]") + expected.count("_2]")


@pytest.mark.parametrize(
    "text",
    [
        "Section 10.2.1.3 and clause 4.1.12.2 of version 2.0.0.1",
        "order 00123842, purchase 00004587345, 732201349959, 113542617735902",
        "身份证110105194912310021",  # wrong check character
        "card 4111 1111 1111 1112",  # Luhn
        "DE88 3704 0044 0532 0130 00",
        "between 1995-1996 and 2010-2011, at 12:30:45, $1,234,567.89",
        "666-45-6789 000-12-3456",
        "std::vector<int>::iterator a::b::c",
        "ISBN 978-3-16-148410-0",
        "the secret: nobody knows; password: required",
        "[EMAIL_1] [PHONE_2] [SECRET_1]",
        "合同编号：HT-2023-0001-138, Contract No. 2019-0012345, File No. 001-38402",
        "人民币15500000000元, RMB 18600000000, ￥13812345678",
        "2019-01-01 to 2020-12-31, dated 12/31/1999; fax 12/31/1999",
        "发票代码 144031909110 统一社会信用代码91110000802100433B",
        "the account of 2019 2020 2021; tel quel 1234567; phone 12 months 2019",
        "CUSIP 037833100, ZIP 94103-1234, patent US 7,123,456, 订单号202301011234567890",
        "a passport 2019 edition, passports for 123456 people",
    ],
)
def test_what_only_looks_so_is_left(text: str) -> None:
    assert findings(text) == []


def test_published_check_digits() -> None:
    """ISO/IEC 7812, GB 11643 and ISO 13616 examples."""
    assert luhn("79927398713")
    assert not luhn("79927398710")
    assert resident_id("11010519491231002X")
    assert iban("GB82 WEST 1234 5698 7654 32")
    assert not iban("GB82 WEST 1234 5698 7654 33")


def test_one_value_one_placeholder_through_the_whole_row() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"to": "a@example.com"}'}}
    row = {
        "id": "a@example.com",
        "messages": [
            {"role": "user", "content": "A@example.com or b@example.com, 138-1234-5678"},
            {"role": "assistant", "content": "13812345678 and b@example.com", "tool_calls": [call]},
        ],
    }
    clean, counts = redact(row)
    first, second = clean["messages"]
    assert first["content"] == "[EMAIL_1] or [EMAIL_2], [PHONE_1]"
    assert second["content"] == "[PHONE_1] and [EMAIL_2]"
    assert second["tool_calls"][0]["function"]["arguments"] == '{"to": "[EMAIL_1]"}'
    assert counts == {"EMAIL": 4, "PHONE": 2}
    assert row["messages"][0]["content"].startswith("A@"), "the row itself is left alone"


PIECES = st.sampled_from(
    ["a@b.co", "13812345678", "+1 212 555 0143", " ", "x", "：", "4111111111111111", "10.9.200.1",
     "password=ab12cd34ef", "sk-abcdefghijklmnopqrst1", KEY, "-", "7", "http://u:p@h/"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=8).map("".join) | st.text(max_size=80))
def test_a_second_time_finds_nothing(text: str) -> None:
    once, _ = redact({"text": text})
    twice, _ = redact(once)
    assert twice == once
