"""Facts are types: no decision of autopsy/ or of a run is read out of a sentence."""

import ast
import re

from helpers import ROOT

AUTOPSY = sorted(ROOT.glob("autopsy/**/*.py"))
RUN = [ROOT / "train.py", *ROOT.glob("trainer/*.py"), *ROOT.glob("rescue/*.py")]
SEARCHES = "(starts|ends)with|r?find|r?partition|r?split|remove(pre|suf)fix"
SEARCHES += "|search|(full)?match|findall|sub"  # of re, and of compiled patterns
# What may be searched: names of operations, modules, tensors, types, files, variables; the
# script's own code; the equation of an einsum.
NAMES = "n|(file)?name|names|func|(fragile_)?op|weak|node|kind|file|path|co_filename"
NAMES += "|__(module|file|name)__|dtype|half|kinds|key|precision|environment"
NAMES += "|_?modules|group|states?|api_name|_overloadname|source_now|code|equation"
# In train.py, trainer/ and rescue/: what a user gave; names in a dict or tuple; tensors.
OF_RUN = "spec|part|word|judged_by|scores|reasons|tensors|whole|about|environ|module|key|name"
OF_RUN += "|abs|index|dtype|state"


def read_back(path, names=NAMES):
    """The searches of strings in a file that may be sentences: (line, code)."""
    for node in ast.walk(ast.parse(path.read_text())):
        searched = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            at_white_space = node.func.attr == "split" and not node.args
            if re.fullmatch(SEARCHES, node.func.attr) and not at_white_space:
                pattern = re.fullmatch("re|[A-Z_]+|later", ast.unparse(node.func.value))
                searched = node.args[-1] if pattern else node.func.value
        elif isinstance(node, ast.Compare):
            sides = node.left, *node.comparators
            texts = [
                text
                for side in sides
                for text in getattr(side, "elts", [side])
                if isinstance(text, ast.JoinedStr)
                or (isinstance(text, ast.Constant) and isinstance(text.value, str))
            ]
            within = isinstance(node.ops[0], ast.In | ast.NotIn) and node.left in texts
            sentence = any(" " in ast.unparse(text) for text in texts)
            searched = node.comparators[0] if within else node.left if sentence else None
        if searched is None:
            continue
        words = re.findall(r"[a-z_]\w*", re.sub(r"\.lower\(| or ", "", ast.unparse(searched)))
        if not re.fullmatch(names, words[-1]):
            yield node.lineno, ast.unparse(node)


SENTENCES = (
    "report.source.startswith('a ')",
    "'still bad' in ''.join(self.tried)",
    "re.search('learning rate', report.suggestion)",
    "'float64' not in went",
    "went.endswith('finite')",
    "report.in_wider_types == 'finite in float32'",
    "symptom.partition(' is ')",
    "f'{source} is' in old.symptom",
    "BAD.match(text)",
    "'nan' in ' '.join(name for name in tried)",
    "'divergence' in run.healing.cures",
    "'eager mode' in run.healing.healed",
    "finding[:2] != ('no memory', step)",
    "'wrong' in symptom.split()",
)


def test_no_decision_of_autopsy_reads_a_sentence_back(tmp_path):
    """Facts are types. Only the two files that write sentences may search strings, and frames.py,
    which reads tracebacks."""
    may = "report.py", "advice.py", "frames.py"
    found = {path: [*read_back(path)] for path in AUTOPSY if path.name not in may}
    assert not {path: lines for path, lines in found.items() if lines}
    planted = tmp_path / "planted.py"
    for line in SENTENCES:
        planted.write_text(f"x = {line}\n")
        assert [*read_back(planted)] and [*read_back(planted, OF_RUN)], line
    for line in (
        "'aten.mul' in str(func)",
        "name.endswith('_backward')",
        "group['eps'] == 0",
        "MATMUL.fullmatch(call.name)",
        "report.op.startswith('aten._')",
    ):
        planted.write_text(f"x = {line}\n")
        assert not [*read_back(planted)], line


def test_no_decision_of_a_run_reads_a_sentence_back(tmp_path):
    found = {path: [*read_back(path, OF_RUN)] for path in RUN}
    assert len(found) > 15 and not {path: lines for path, lines in found.items() if lines}
    planted = tmp_path / "planted.py"
    planted.write_text("x = finding.kind == 'too many'\n")
    assert [*read_back(planted, OF_RUN)]
