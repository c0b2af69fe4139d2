#!/usr/bin/env python3
"""Write toolkit/report/page/vega.js, by which the report draws in a browser, from the installed vl-convert-python.

It lies in the package because vl-convert-python, which makes the pictures, has 84 MB, and a page needs no network.
Look at a report in a browser afterwards (tests/unit/test_report_in_browser.py).
"""

import argparse
from importlib import metadata
from pathlib import Path

import vl_convert

from toolkit.report.page import VEGA_LITE

TARGET = Path(__file__).parents[1] / "toolkit" / "report" / "page" / "vega.js"
SNIPPET = "window.vegaEmbed = vegaEmbed;"
HEAD = """\
/*! vl-convert {vl_convert}'s bundle (scripts/bundle_vega.py) of Vega {vega}, Vega-Lite {lite}, Vega-Embed {embed}:

Vega, Vega-Lite, Vega-Embed, Vega-Themes, Vega-Tooltip: Copyright (c) 2015-2025 University of Washington Interactive
Data Lab and contributors; the BSD 3-Clause License.
D3, internmap, topojson-client: Copyright 2010-2025 Mike Bostock; delaunator: Copyright (c) 2021 Mapbox; semver:
Copyright (c) Isaac Z. Schlueter and Contributors; the ISC License.
fast-json-patch: Copyright (c) 2013-2020 Joachim Wester; json-stringify-pretty-compact: Copyright (c) 2014-2022 Simon
Lydell; the MIT License.

The BSD 3-Clause License. Redistribution and use in source and binary forms, with or without modification, are
permitted provided that the following conditions are met:
1. Redistributions of source code must retain the above copyright notice, this list of conditions and the following
disclaimer.
2. Redistributions in binary form must reproduce the above copyright notice, this list of conditions and the following
disclaimer in the documentation and/or other materials provided with the distribution.
3. Neither the name of the copyright holder nor the names of its contributors may be used to endorse or promote
products derived from this software without specific prior written permission.
THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES,
INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL,
SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY,
WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE
OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.

The ISC License. Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee
is hereby granted, provided that the above copyright notice and this permission notice appear in all copies.
THE SOFTWARE IS PROVIDED "AS IS" AND THE AUTHOR DISCLAIMS ALL WARRANTIES WITH REGARD TO THIS SOFTWARE INCLUDING ALL
IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS. IN NO EVENT SHALL THE AUTHOR BE LIABLE FOR ANY SPECIAL, DIRECT,
INDIRECT, OR CONSEQUENTIAL DAMAGES OR ANY DAMAGES WHATSOEVER RESULTING FROM LOSS OF USE, DATA OR PROFITS, WHETHER IN
AN ACTION OF CONTRACT, NEGLIGENCE OR OTHER TORTIOUS ACTION, ARISING OUT OF OR IN CONNECTION WITH THE USE OR
PERFORMANCE OF THIS SOFTWARE.

The MIT License. Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction, including without
limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the
Software, and to permit persons to whom the Software is furnished to do so, subject to the following conditions:
The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.
THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
*/
"""


def bundle() -> str:
    """Return the script: Vega-Embed as `window.vegaEmbed`, in the version of Vega-Lite that altair writes."""
    versions = {
        "vl_convert": metadata.version("vl-convert-python"),
        "vega": vl_convert.get_vega_version(),
        "lite": VEGA_LITE,
        "embed": vl_convert.get_vega_embed_version(),
    }
    return HEAD.format(**versions) + vl_convert.javascript_bundle(SNIPPET, VEGA_LITE)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(bundle(), encoding="utf-8")
