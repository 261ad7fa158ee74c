// The strips at the top: filters hide those whose row they leave out, and buttons copy code and commands.

function showAnswers(rows) {
  const shown = new Set(rows.map((row) => row.subject));
  for (const answer of document.querySelectorAll(".answer")) answer.hidden = !shown.has(ROWS[Number(answer.dataset.row)]?.subject);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page from a file may be denied the clipboard: the old way still works.
    const holder = Object.assign(element("textarea"), { value: text });
    document.body.append(holder);
    holder.select();
    document.execCommand("copy");
    holder.remove();
  }
}

function watchCopies() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.(".copy");
    if (!button) return;
    await copyText(button.dataset.copy);
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = before; }, 1200);
  });
}
