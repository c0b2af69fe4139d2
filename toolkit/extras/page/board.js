"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const words = JSON.parse(at("words").textContent);
  const make = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);  // texts stay texts
    return made;
  };
  const said = (text, isError = false) => {
    at("said").textContent = text;
    at("said").className = isError ? "bad" : "";
  };
  const post = async (name, given = {}) => {
    const answer = await fetch(`do/${name}`, { method: "POST", body: JSON.stringify(given) }).catch(() => {
      throw new Error(words.gone);
    });
    if (answer.ok) return answer;
    const { error } = await answer.json().catch(() => ({}));
    throw new Error(error ?? `${answer.status} ${answer.statusText}`);
  };
  const ask = async (name, given) => (await post(name, given)).json();
  const stream = async (name, given, take) => {
    const reader = (await post(name, given)).body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) take(part.value);
  };
  const on = (id, event, act) => at(id).addEventListener(event, async (happened) => {
    happened.preventDefault();
    try {
      await act(happened);
    } catch (error) {
      said(error.message, true);
    }
  });

  // Runs
  const compared = new Set();
  let shown = [], seen = "", isBusy = false;
  const report = () => `report?${new URLSearchParams(shown.map((run) => ["run", run]))}`;
  const open = (runs) => {
    shown = runs;
    at("shown").hidden = at("log").hidden = !(at("report").hidden = false);
    at("shown").hidden = false;
    at("shown-name").textContent = runs.join(" · ");
    at("report").src = report();
  };
  const openLog = async (run) => {
    shown = [];
    const { text } = await ask("log", { run });
    at("shown").hidden = at("log").hidden = !(at("report").hidden = true);
    at("shown-name").textContent = run;
    at("log").textContent = text;
  };
  const button = (text, act) => {
    const made = make("button", { textContent: text });
    made.addEventListener("click", () => act().catch((error) => said(error.message, true)));
    return made;
  };
  const row = (one) => {
    const name = one.run || one.name;
    const link = one.run ? make("a", { href: "#runs", textContent: name, onclick: () => open([name]) }) : name;
    const box = make("input", { type: "checkbox", checked: compared.has(name), disabled: !one.run, ariaLabel: name });
    box.addEventListener("change", () => {
      compared[box.checked ? "add" : "delete"](name);
      at("compare").disabled = compared.size < 2;
    });
    const state = make("span", { className: `state ${one.state}`, textContent: one.cells[1] });
    const stop = one.is_alive ? [button(words.stop, async () => said((await ask("stop", { run: name })).said))] : [];
    const log = one.has_log ? [button(words.log, () => openLog(name))] : [];
    const cells = [[box], [link], [state], ...one.cells.slice(2).map((cell) => [cell]), [...stop, ...log]];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, ...cell)));
  };
  const list = async () => {
    if (isBusy || document.hidden) return;
    isBusy = true;
    try {
      const { heads, rows } = await ask("runs");
      const now = JSON.stringify(rows);
      if (now === seen) return;
      const before = seen ? JSON.parse(seen) : [];
      seen = now;
      at("heads").replaceChildren(make("tr", {}, ...["", ...heads, ""].map((head) => make("th", { textContent: head }))));
      at("rows").replaceChildren(...rows.map(row));
      at("no-runs").hidden = rows.length > 0;
      at("paths").replaceChildren(...rows.filter((one) => one.run).map((one) => make("option", { value: one.path })));
      const old = new Map(before.map((one) => [one.run, JSON.stringify(one)]));
      const isNew = rows.some((one) => shown.includes(one.run) && old.has(one.run) && old.get(one.run) !== JSON.stringify(one));
      if (isNew && at("live").checked) at("report").src = report();
    } finally {
      isBusy = false;
    }
  };
  on("compare", "click", () => open([...compared]));

  // Recipe
  const choices = (names, first) => [make("option", { value: "", textContent: first }), ...names.map((name) => make("option", { value: name, textContent: name }))];
  const fields = new Map();
  const field = (key, choicesOf, text) => {
    const input = choicesOf.length ? make("select", {}, ...choices(choicesOf, "")) : make("input", { spellcheck: false });
    input.name = key;
    const label = make("label", { className: "key" }, make("code", { textContent: key }), input, make("small", { textContent: text }));
    fields.set(key, { input, label });
    return label;
  };
  const typed = () => {
    const chosen = (isGroup) => Object.fromEntries([...fields].filter(([key, { input }]) => key.startsWith("/") === isGroup && input.value.trim()).map(([key, { input }]) => [key.replace("/", ""), input.value.trim()]));
    return { base: at("base").value, gpus: at("gpus").value.trim(), groups: chosen(true), values: chosen(false) };
  };
  const tableOf = (columns) => {  // letters of some languages are wider than one column of a terminal
    const last = at("plan").lastElementChild;
    if (last?.rows?.[0].cells.length === columns) return last;
    return at("plan").appendChild(make("table", {}));
  };
  const show = ({ errors, more, notes, plan, text, values }) => {
    for (const [key, { input, label }] of fields) {
      const wrong = errors.find((error) => error.keys.includes(key) || error.text.includes(`${key} = `));
      input.title = wrong?.text ?? "";
      input.ariaInvalid = String(Boolean(wrong));
      label.classList.toggle("bad", Boolean(wrong));
      const value = values[key] ?? "";
      if (input.tagName === "INPUT") input.placeholder = value;
      else if (!key.startsWith("/")) input.options[0].textContent = value;
    }
    at("errors").replaceChildren(...errors.map((error) => make("li", { className: "bad", textContent: error.text })));
    if (more) at("errors").append(make("li", { textContent: `… ${more}` }));
    if (!errors.length) at("errors").append(make("li", { className: "good", textContent: words.in_order }));
    at("notes").replaceChildren(...notes.map((note) => make("p", { className: "note", textContent: note })));
    // Tables keep their columns; sentences may be longer than the page is wide.
    at("plan").replaceChildren();
    for (const line of plan.join("\n").split("\n").map((one) => one.trim()).filter(Boolean)) {
      const cells = line.split(/ {2,}/);
      if (cells.length < 3) at("plan").append(make("p", { textContent: line }));
      else tableOf(cells.length).append(make("tr", {}, ...cells.map((cell) => make("td", { textContent: cell }))));
    }
    at("text").textContent = text;
  };
  let timer = 0, latest = 0;
  const check = async () => {
    const mine = ++latest;
    const found = await ask("check", typed());
    if (mine === latest) show(found);  // what was typed meanwhile is checked by a later one
    document.documentElement.dataset.checked = mine;
  };
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(() => check().catch((error) => said(error.message, true)), 300);
  };
  const build = async () => {
    const { recipes, groups, keys } = await ask("form");
    at("base").append(...recipes.map((name) => make("option", { textContent: name })));
    at("groups").append(...Object.entries(groups).map(([group, names]) => {
      const label = field(`/${group}`, names, "");
      fields.get(`/${group}`).input.options[0].textContent = words.of_recipe;
      return label;
    }));
    const sections = Object.groupBy(keys, ({ key }) => key.includes(".") ? key.split(".")[0] : "");
    for (const [name, inner] of Object.entries(sections)) {
      const parts = inner.map(({ key, choices: names, text }) => field(key, names, text));
      at("keys").append(make("details", {}, make("summary", { textContent: name || "…" }), ...parts));
    }
    await check();
  };
  on("form", "input", ({ target }) => {
    if (target.id !== "search") return later();
    const wanted = target.value.trim().toLowerCase();
    for (const part of at("keys").children) {
      const labels = [...part.querySelectorAll("label")];
      for (const label of labels) label.hidden = !label.textContent.toLowerCase().includes(wanted);
      part.hidden = labels.every((label) => label.hidden);
      part.open = Boolean(wanted) && !part.hidden;
    }
  });
  on("form", "submit", check);
  on("save", "click", async () => {
    const given = { ...typed(), file: at("file").value.trim() };
    const answer = await ask("save", given);
    said((answer.exists && confirm(`${answer.said}\n${words.overwrite}`) ? await ask("save", { ...given, overwrite: true }) : answer).said);
  });
  on("start", "click", async () => {
    said((await ask("start", { recipe: at("file").value.trim(), name: at("name").value, ranks: at("ranks").value })).said);
    location.hash = "runs";
  });

  // Samples, coloured as on a terminal
  const KINDS = { "1;32": "trained", 36: "special", 90: "padding" };
  const marked = (text) => text.split("\x1b[").map((part, place) => {
    if (!place) return part;
    const end = part.indexOf("m");
    const kind = KINDS[part.slice(0, end)];
    return kind ? make("span", { className: kind, textContent: part.slice(end + 1) }) : part.slice(end + 1);
  });
  on("show", "click", async () => {
    let text = "";
    at("marked").textContent = words.working;
    await stream("samples", { ...typed(), n: at("count").value, split: at("split").value }, (part) => {
      text += part;
      at("marked").replaceChildren(...marked(text));
    });
    at("marked").dataset.done = "true";
  });

  // Chat
  const talk = async (name, given) => {
    const answer = make("p", { className: "answer" });
    let rest = "";
    at("talk").append(answer);
    at("ask").disabled = true;
    await stream(name, given, (part) => {
      const lines = (rest + part).split("\n");
      rest = lines.pop();
      for (const line of lines.filter(Boolean).map((one) => JSON.parse(one))) {
        if (line.text) answer.textContent += line.text;
        if (line.note?.trim()) answer.before(make("p", { className: "note", textContent: line.note }));
        if (line.closed) answer.before(make("p", { className: "note bad", textContent: line.closed }));
        if ("end" in line) at("ask").disabled = false;
      }
    });
    return answer;
  };
  on("load", "click", async () => {
    said(words.working);
    await talk("open", { path: at("path").value.trim() });
    said(at("ask").disabled ? "" : words.loaded);
  });
  on("unload", "click", async () => {
    await ask("close");
    at("ask").disabled = true;
    at("talk").replaceChildren();
    said("");
  });
  on("ask", "click", () => {
    const text = at("question").value.trim().replaceAll("\n", " ");
    if (!text) return undefined;
    at("talk").append(make("p", { className: "asked", textContent: text }));
    at("question").value = "";
    return talk("ask", { text });
  });
  on("question", "keydown", (happened) => {
    if (happened.key === "Enter" && !happened.shiftKey) at("ask").click();
  });
  on("interrupt", "click", () => ask("interrupt"));

  // Which part is shown
  const turn = () => {
    const name = ["runs", "recipe", "samples", "chat"].find((one) => `#${one}` === location.hash) ?? "runs";
    for (const part of document.querySelectorAll("main")) part.hidden = part.id !== name;
    for (const link of document.querySelectorAll("nav a")) link.ariaCurrent = String(link.hash === `#${name}`);
    scrollTo(0, 0);  // not where the part of this name begins
    if (name === "runs") list().catch((error) => said(error.message, true));
  };
  addEventListener("hashchange", turn);
  history.replaceState(null, "", location.pathname + location.hash);  // the token is in the cookie now
  turn();
  build().catch((error) => said(error.message, true));
  setInterval(() => at("runs").hidden || list().catch((error) => said(error.message, true)), 3000);
})();
