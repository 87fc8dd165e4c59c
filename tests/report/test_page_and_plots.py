"""Pages escape what they quote, tables line up, curves are means of what was read."""

from deeploop.report import page, plots


def test_page_escapes_everything_it_is_given() -> None:
    evil = '<script>alert("x")</script>'
    text = page.page(
        evil,
        [
            page.heading(evil),
            page.paragraph(evil),
            page.command(evil),
            page.figure("<svg></svg>", evil),
            page.table([evil], [[evil]]),
        ],
    )
    assert "<script>" not in text
    assert text.count("&lt;script&gt;") == 8  # the title stands twice


def test_text_table_aligns_columns() -> None:
    lines = page.text_table(("name", "x"), [("a", "1.5"), ("longer", "-10.25")]).splitlines()
    assert lines == ["name         x", "──────  ──────", "a          1.5", "longer  -10.25"]


def test_numbers_with_remarks_stand_to_the_right_as_numbers_do() -> None:
    losses = [
        "2.1",
        "2.05 ± 0.07 (2 runs of 1 seed)",
        "2.0 (1 of 3 collapsed, 3 runs of 2 seeds)",
        page.MISSING,
    ]
    counts = ["2", "3 runs of 2 seeds", "3/5", "0.09 to 0.91"]
    words = ["2", "2 blocks of width 32", "2", "2"]
    kinds = page.column_kinds(["losses", "counts", "words"], list(zip(losses, counts, words, strict=True)))
    assert kinds == ["", "", ' class="words"']


def test_a_rule_keeps_its_colour_whatever_is_added_to_it() -> None:
    labels = ("pre-norm", "pre-norm 1/N", "pre-norm λ/(R√K)", "flat", "DeepNorm p=0.25", "DeepLoop p=0.5")
    alone = {label: plots.colours([label])[label] for label in labels}
    assert plots.colours(labels) == alone
    assert len({*alone.values()}) == len(labels)
    for suffix in (" + unigram bias", ", peak_lr 0.001", " λ=2", ", set-up A"):
        assert [*plots.colours([label + suffix for label in labels]).values()] == [*alone.values()]
    others = plots.colours(["post-norm", "sideways p=0.3", "flat", "flat + wait", "flat + Muon"])
    assert len({*others.values()}) == len(others)
    assert [label for label, own in others.items() if own in alone.values()] == ["flat"]


def test_running_mean_against_definition() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    expected = [sum(values[max(0, i - 2) : i + 1]) / len(values[max(0, i - 2) : i + 1]) for i in range(6)]
    assert plots.running_mean(values, 3) == expected
    assert plots.running_mean(values, 1) == values


def test_series_leaves_out_what_was_not_recorded() -> None:
    records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3}, {"step": 4, "loss": 1.0}]
    assert plots.series(records, "loss") == ([1, 4], [2.0, 1.0])
