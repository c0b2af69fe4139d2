"""Scores of answers, against values counted by hand and against what public libraries gave for the same texts."""

import math

import pytest
from hypothesis import given, strategies as st

from toolkit.config.load import load
from toolkit.config.schema import Metric
from toolkit.evaluate.metrics import Scores, score, tokenization
from toolkit.messages import ConfigError

ANSWERS = [
    "这件连衣裙采用了柔软的雪纺面料，穿着舒适。",
    "经典的圆领设计，显瘦百搭。简约的风格",
    "The cat sat on the mat",
]
REFERENCES = [
    "这款连衣裙选用柔软亲肤的雪纺面料，上身十分舒适。",
    "圆领设计经典百搭，修饰颈部线条。整体风格简约大方",
    "The cat is on the mat.",
]
# rouge-score 0.1.2 over the same characters, each written as a word of its own: rouge1, rouge2, rougeL, F1 x 100.
ROUGE_SCORE = [(71.111111, 46.511628, 71.111111), (66.666667, 35.0, 42.857143), (88.235294, 75.0, 88.235294)]
# The loop of ChatGLM-6B's ptuning/main.py with jieba 0.42.1, rouge-chinese 1.0.3 and nltk 3.10.4.
CHATGLM = {
    Metric.chatglm_rouge_1: [61.5385, 69.5652, 76.9231],
    Metric.chatglm_rouge_2: [33.3333, 9.0909, 54.5455],
    Metric.chatglm_rouge_l: [61.5385, 41.6667, 76.9231],
    Metric.chatglm_bleu_4: [32.6202, 16.2861, 78.392],
}
OWN = [metric for metric in Metric if metric not in CHATGLM]


def of(metric: Metric, answer: str, reference: str) -> Scores:
    """Return a metric of one answer."""
    return score(metric, [answer], [reference], tokenization([reference]))


# "今天天气很好" against "今天天气不错": 4 of 6 characters, 3 of 5 pairs, 2 of 4 triples, 1 of 3 fours; equally long.
BY_HAND = [
    (Metric.bleu, "今天天气很好", "今天天气不错", 100 * (4 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25),
    # "a b c d" against "a b c d e": all right, but too short: exp(1 - 5/4).
    (Metric.bleu, "a b c d", "a b c d e", 100 * math.exp(-0.25)),
    # One of two characters, none of one pair: precision and recall are (1/2 + 0/1) / 2 each, and so is F.
    (Metric.chrf, "ab", "ac", 25.0),
    (Metric.rouge_1, "今天天气很好", "今天天气不错", 100 * 4 / 6),
    (Metric.rouge_2, "今天天气很好", "今天天气不错", 100 * 3 / 5),
    # The longest common subsequence of "abcde" and "aXcYe Z" is "ace": 3 of 5, 3 of 6 (blanks do not count).
    (Metric.rouge_l, "abcde", "aXcYe Z", 100 * 2 * (3 / 5) * (3 / 6) / (3 / 5 + 3 / 6)),
    # "aab" against "abb": "a" once and "b" once in both.
    (Metric.rouge_1, "aab", "abb", 100 * 2 / 3),
    (Metric.exact_match, " 好 ", "好", 100.0),
    (Metric.exact_match, "好。", "好", 0.0),
    # 今 天 天 气: three different of four; all three pairs differ.
    (Metric.distinct_1, "今天天气", "好", 75.0),
    (Metric.distinct_2, "今天天气", "好", 100.0),
    (Metric.distinct_1, "to be or not to be", "yes", 100 * 4 / 6),
    (Metric.distinct_2, "to be or not to be", "yes", 100 * 4 / 5),
    (Metric.length, "你好 a", "", 4.0),
]


@pytest.mark.parametrize(("metric", "answer", "reference", "wanted"), BY_HAND)
def test_counted_by_hand(metric: Metric, answer: str, reference: str, wanted: float) -> None:
    found = of(metric, answer, reference)
    assert found.value == pytest.approx(wanted, abs=1e-9)
    assert found.each == pytest.approx([wanted], abs=1e-9)


def test_rouge_is_that_of_the_public_library() -> None:
    for place, metric in enumerate((Metric.rouge_1, Metric.rouge_2, Metric.rouge_l)):
        found = score(metric, ANSWERS, REFERENCES, "zh")
        wanted = [row[place] for row in ROUGE_SCORE]
        assert found.each == pytest.approx(wanted, abs=1e-6)
        assert found.value == pytest.approx(sum(wanted) / 3, abs=1e-6)


def test_bleu_and_chrf_are_sacrebleus() -> None:
    import sacrebleu

    assert tokenization(REFERENCES[:2]) == "zh"
    assert tokenization(REFERENCES[2:]) == tokenization(["café — naïve"]) == "13a"
    chinese = score(Metric.bleu, ANSWERS[:2], REFERENCES[:2], "zh")
    assert chinese.value == sacrebleu.corpus_bleu(ANSWERS[:2], [REFERENCES[:2]], tokenize="zh").score
    assert chinese.value == pytest.approx(24.974463, abs=1e-6)
    assert "tok:zh" in chinese.signature
    assert of(Metric.bleu, ANSWERS[2], REFERENCES[2]).value == pytest.approx(32.159351, abs=1e-6)
    chrf = score(Metric.chrf, ANSWERS[:2], REFERENCES[:2], "zh")
    assert chrf.value == sacrebleu.corpus_chrf(ANSWERS[:2], [REFERENCES[:2]]).score
    assert chrf.value == pytest.approx(23.384382, abs=1e-6)
    # Why the tokenization is chosen: sacrebleu's default takes either sentence for one word.
    assert sacrebleu.corpus_bleu(["今天天气不错"], [["今天天气不错"]]).score == 0
    assert of(Metric.bleu, "今天天气不错", "今天天气不错").value == pytest.approx(100)


@pytest.mark.parametrize("metric", CHATGLM)
def test_chatglm_metrics_are_what_the_repositories_computed(metric: Metric) -> None:
    pytest.importorskip("nltk")
    pytest.importorskip("rouge_chinese")
    pytest.importorskip("jieba")
    found = score(metric, ANSWERS, REFERENCES, "zh")
    assert found.each == CHATGLM[metric]
    assert found.value == pytest.approx(sum(CHATGLM[metric]) / 3)
    assert score(metric, ["", "。"], ["你好", "你好"], "zh").value == 0


def test_chatglm_metrics_say_at_once_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.config.rules import check_rules

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    loaded = load(["recipe=quickstart", "evaluate.metrics=[bleu,chatglm_rouge_l]"])
    with pytest.raises(ConfigError, match=r"chatglm_rouge_l needs .* pip install jieba rouge-chinese nltk$"):
        check_rules(loaded)


@pytest.mark.parametrize("metric", OWN)
def test_an_empty_answer_scores_nothing(metric: Metric) -> None:
    found = score(metric, ["", "今天"], ["今天", "今天"], "zh")
    assert found.each[0] == 0
    assert score(metric, ["", ""], ["今天", ""], "zh").each[0] == 0


TEXTS = st.text(alphabet="今天气好，ab 1", max_size=12)


@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_whatever_is_answered_has_a_score(pairs: list[tuple[str, str]]) -> None:
    answers, references = ([pair[side] for pair in pairs] for side in (0, 1))
    for metric in OWN:
        found = score(metric, answers, references, tokenization(references))
        assert len(found.each) == len(pairs)
        assert all(0 <= value <= 100 + 1e-9 for value in [found.value, *found.each])


@given(text=st.text(alphabet="今天气好，ab1", min_size=4, max_size=30), other=TEXTS)
def test_equal_texts_score_all_and_order_does_not_matter_to_rouge(text: str, other: str) -> None:
    for metric in (Metric.chrf, Metric.rouge_1, Metric.rouge_2, Metric.rouge_l, Metric.exact_match):
        assert of(metric, text, text).value == pytest.approx(100)
    for metric in (Metric.rouge_1, Metric.rouge_2, Metric.rouge_l):
        assert of(metric, text, other).value == pytest.approx(of(metric, other, text).value)
