const form = document.querySelector(".filter");
if (form) {
  const cases = [...document.querySelectorAll("article[data-case]")].map(
    (element) => ({ element, ...JSON.parse(element.dataset.case) }));
  const show = () => {
    const kind = form.elements.kind.value, label = form.elements.label.value;
    let shown = 0;
    for (const { element, kinds, labels } of cases) {
      element.hidden = (kind && !kinds.includes(kind)) || (label && !labels.includes(label));
      shown += !element.hidden;
    }
    form.querySelector("output").textContent = `${shown} of ${cases.length}`;
  };
  form.hidden = false;
  form.addEventListener("change", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}
