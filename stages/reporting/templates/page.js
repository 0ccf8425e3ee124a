"use strict";
/* What the page does without a server: sort, filter and download tables, tell a point's numbers, unfold for links and print.
   Its controls are made here, so that a page whose scripts are off has none that do nothing. Nothing is ever loaded or sent. */
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const squeeze = (text) => text.replace(/\s+/g, " ").trim();

  /* ---- Cells: a text, and a note in <small>, such as an interval */

  const readCell = (cell) => {
    const copy = cell.cloneNode(true);
    all("small", copy).forEach((small) => small.remove());
    const note = all("small", cell).map((small) => small.textContent).join(" ");
    return { text: squeeze(copy.textContent), note: squeeze(note) };
  };
  const toNumber = (text) => (/^[+-]?\d+(\.\d+)?(e[+-]?\d+)?[×%]?$/.test(text) ? parseFloat(text) : null);
  const isEmpty = (text) => text === "" || text === "–";
  const headings = (table) => (table.tHead ? [...table.tHead.rows[0].cells].map((cell) => squeeze(cell.textContent)) : []);

  /* ---- Sorting: plain decoding, of class "last", stays below; cells without a value come last in both directions */

  const compareTexts = (a, b) => {
    const [x, y] = [toNumber(a), toNumber(b)];
    return x !== null && y !== null ? x - y : a.localeCompare(b, "en", { numeric: true });
  };
  const sortRows = (table, column, sign) => {
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => {
      const { text } = readCell(row.cells[column]);
      return { row, text, last: row.classList.contains("last"), empty: isEmpty(text) };
    });
    keyed.sort((a, b) => a.last - b.last || a.empty - b.empty || sign * compareTexts(a.text, b.text));
    body.append(...keyed.map(({ row }) => row));
  };
  const makeSortable = (table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = make("button", { type: "button", className: "sort" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = column === 0 ? "ascending" : "descending";
        const other = column === 0 ? "descending" : "ascending";
        const direction = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", direction);
        sortRows(table, column, direction === "ascending" ? 1 : -1);
      });
    });
  };

  /* ---- Filtering: words that a row must hold, or a column's name with a bound, as "topk=2 tau>4" */

  const TESTS = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };
  const parseTerm = (term, names) => {
    const bound = /^([^<>=]+)(<=|>=|<|>|=)(-?[\d.]+)$/.exec(term);
    if (!bound) return (row) => squeeze(row.textContent).toLowerCase().includes(term);
    const [, name, operator, limit] = bound;
    const exact = names.findIndex((each) => each.split(" ")[0] === name);
    const column = exact >= 0 ? exact : names.findIndex((each) => each.includes(name));
    if (column < 0) throw new Error(`no column ${name}`);
    return (row) => {
      const value = toNumber(readCell(row.cells[column]).text);
      return value !== null && TESTS[operator](value, Number(limit));
    };
  };
  const filterRows = (table, wanted) => {
    const names = headings(table).map((name) => name.toLowerCase());
    const tests = wanted.toLowerCase().split(/\s+/).filter(Boolean).map((term) => parseTerm(term, names));
    const rows = [...table.tBodies[0].rows].filter((row) => !row.classList.contains("last"));
    rows.forEach((row) => { row.hidden = !tests.every((test) => test(row)); });
    return tests.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} trees` : "";
  };
  const makeFilter = (table, name) => {
    const example = headings(table).includes("topk") ? "topk=2 tau>4" : "speedup>1.2";
    const field = make("input", { type: "search", placeholder: example });
    field.setAttribute("aria-label", `Filter ${name}: words, or a column with a bound, as ${example}`);
    const found = make("output", {});
    field.addEventListener("input", () => {
      try {
        found.textContent = filterRows(table, field.value);
      } catch (error) {
        found.textContent = error.message;
      }
    });
    return make("span", { className: "filter" }, make("span", {}, "filter "), field, " ", found);
  };

  /* ---- CSV: the rows shown, in their order; a column's notes in a column of their own, lines between rows in columns of theirs */

  const collectRows = (table) => {
    const rows = [];
    let group = "";
    for (const row of table.tBodies[0].rows) {
      if (row.hidden) continue;
      if (row.classList.contains("load")) group = squeeze(row.textContent);
      else if (row.classList.contains("why")) rows[rows.length - 1].remark.push(squeeze(row.textContent));
      else {
        const cells = [...row.cells].flatMap((cell) => [readCell(cell), ...Array(cell.colSpan - 1).fill({ text: "", note: "" })]);
        rows.push({ group, cells, remark: [] });
      }
    }
    return rows;
  };
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const plain = (text) => (isEmpty(text) ? "" : toNumber(text) === null ? text : text.replace(/[×%]$/, ""));
  const toCsv = (table) => {
    const rows = collectRows(table);
    const names = headings(table);
    const width = Math.max(names.length, ...rows.map((row) => row.cells.length));
    const columns = [];
    if (rows.some((row) => row.group)) columns.push(["group", (row) => row.group]);
    for (let at = 0; at < width; at += 1) {
      const read = (row) => row.cells[at] ?? { text: "", note: "" };
      columns.push([names[at] ?? "", (row) => plain(read(row).text)]);
      const alone = rows.every((row) => isEmpty(read(row).text)); /* the note is the cell's only text */
      if (alone && rows.some((row) => read(row).note)) columns[columns.length - 1][1] = (row) => read(row).note;
      else if (rows.some((row) => read(row).note)) columns.push([`${names[at] ?? ""} note`.trim(), (row) => read(row).note]);
    }
    if (rows.some((row) => row.remark.length)) columns.push(["remark", (row) => row.remark.join(" ")]);
    const lines = rows.map((row) => columns.map(([, read]) => quote(read(row))).join(","));
    return [...(names.length ? [columns.map(([name]) => quote(name)).join(",")] : []), ...lines, ""].join("\n");
  };
  const makeDownload = (table, name) => {
    const button = make("button", { type: "button" }, "CSV");
    button.setAttribute("aria-label", `Download ${name} as CSV`);
    button.addEventListener("click", () => {
      const url = URL.createObjectURL(new Blob([toCsv(table)], { type: "text/csv;charset=utf-8" }));
      const file = name.toLowerCase().replace(/[^a-z0-9_]+/g, "-").replace(/^-|-$/g, "");
      make("a", { href: url, download: `${file}.csv` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10_000);
    });
    return button;
  };

  all("table").forEach((table) => {
    const name = squeeze(table.caption.textContent);
    if (table.classList.contains("sortable")) makeSortable(table);
    const tools = make("div", { className: "tools" });
    if (table.classList.contains("filtered") && table.tBodies[0].rows.length > 4) tools.append(makeFilter(table, name));
    if (table.classList.contains("results")) {
      const box = make("input", { type: "checkbox" });
      box.addEventListener("change", () => table.classList.toggle("whole", box.checked));
      tools.append(make("label", { className: "columns" }, box, " all columns"));
    }
    tools.append(makeDownload(table, name));
    table.parentElement.after(tools);
  });

  /* ---- Points: the one nearest to the pointer, or the focused one, tells its numbers. A plot is one stop of the Tab key */

  const tip = make("div", { className: "tip", hidden: true });
  tip.setAttribute("aria-hidden", "true"); /* the focused point's label says the same */
  document.body.append(tip);
  const NEAR = 24; /* pixels */
  const centre = (circle) => {
    const box = circle.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height / 2];
  };
  const hide = () => {
    tip.hidden = true;
    all("circle.shown").forEach((circle) => circle.classList.remove("shown"));
  };
  const show = (circle) => {
    hide();
    circle.classList.add("shown");
    tip.textContent = circle.getAttribute("aria-label");
    tip.hidden = false;
    const [x, y] = centre(circle);
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.max(4, Math.min(x - width / 2, document.documentElement.clientWidth - width - 4));
    tip.style.left = `${left}px`;
    tip.style.top = `${y - height - 12 < 0 ? y + 12 : y - height - 12}px`;
  };
  const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  all("svg.points").forEach((svg) => {
    const circles = all("circle", svg);
    circles.forEach((circle, at) => {
      const title = circle.querySelector("title");
      circle.setAttribute("role", "img");
      circle.setAttribute("aria-label", title.textContent);
      circle.setAttribute("tabindex", at ? "-1" : "0");
      title.remove(); /* else the browser shows it too */
      circle.addEventListener("focus", () => show(circle));
      circle.addEventListener("blur", hide);
    });
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide();
      if (!(event.key in MOVES)) return;
      event.preventDefault();
      const at = circles.indexOf(document.activeElement) + MOVES[event.key];
      const next = circles[Math.max(0, Math.min(at, circles.length - 1))];
      circles.forEach((circle) => circle.setAttribute("tabindex", circle === next ? "0" : "-1"));
      next.focus();
    });
    const point = (event) => {
      const places = circles.map((circle) => [circle, Math.hypot(...centre(circle).map((at, axis) => at - [event.clientX, event.clientY][axis]))]);
      const [nearest, distance] = places.reduce((best, each) => (each[1] < best[1] ? each : best));
      if (distance < NEAR) show(nearest);
      else hide();
    };
    svg.parentElement.addEventListener("pointermove", point);
    svg.parentElement.addEventListener("pointerdown", point);
    svg.parentElement.addEventListener("pointerleave", hide);
  });
  addEventListener("scroll", hide, { passive: true, capture: true });

  /* ---- Folds */

  const reveal = (hash) => {
    const target = hash.length > 1 && document.getElementById(decodeURIComponent(hash.slice(1)));
    if (!target) return;
    for (let part = target; part; part = part.parentElement) if (part.matches("details")) part.open = true;
    target.scrollIntoView();
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (link) reveal(link.hash);
  });
  addEventListener("hashchange", () => reveal(location.hash));
  reveal(location.hash);

  const parts = all("details.part");
  const toggle = make("button", { type: "button", className: "unfold" }, "Unfold all");
  toggle.addEventListener("click", () => {
    const open = parts.some((part) => !part.open);
    parts.forEach((part) => { part.open = open; });
    toggle.textContent = open ? "Fold all" : "Unfold all";
  });
  document.querySelector(".parts").before(toggle);

  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = all("details:not([open])");
    unfolded.forEach((part) => { part.open = true; });
  });
  addEventListener("afterprint", () => unfolded.forEach((part) => { part.open = false; }));
})();
