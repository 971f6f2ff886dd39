// Tables of class "sorts": each column's head becomes a button that sorts by it. Cells without a value come last.
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const cells = [...body.rows].map((row) => row.cells[column]);
    const numeric = cells.some((cell) => "by" in cell.dataset);
    const value = (row) => numeric ? parseFloat(row.cells[column].dataset.by) : row.cells[column].textContent;
    const missing = (it) => it === "" || it !== it;  // the latter is no number
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      // Of numbers the largest first; of names the first.
      const before = head.getAttribute("aria-sort");
      const down = before === null ? numeric : before === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
      body.append(...[...body.rows].sort((one, other) => {
        const a = value(one), b = value(other);
        if (missing(a) || missing(b)) return missing(a) - missing(b);
        return down ? order(b, a) : order(a, b);
      }));
    });
  });
}
