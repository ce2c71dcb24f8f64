// Form fields with labels and error messages.

import { element, uniqueId } from "./dom.js";

/** Return a control with its label. */
export function field(label, control) {
  control.id = uniqueId(control.name);
  return element("div", { class: "field" }, element("label", { for: control.id }, label), control);
}

/** Return a number input. */
export function numberInput(name, { min, max, step = 1, value }) {
  const mode = step === 1 ? "numeric" : "decimal";
  return element("input", { type: "number", inputmode: mode, name, min, max, step, value, required: true });
}

/** Return a select of [value, text] pairs. */
export function select(name, options) {
  return element("select", { name }, options.map(([value, text]) => element("option", { value }, text)));
}

/** Select a value; add it if it is not an option, because a link may contain any routing. */
export function selectValue(node, value) {
  if (![...node.options].some((option) => option.value === value)) {
    node.append(element("option", { value }, value));
  }
  node.value = value;
}

/** Return the fields of the conditions that a run accepts: a prompt, a class, or both. */
export function conditionFields({ conditioning: { text, labels }, limits }) {
  const placeholder = "Describe an image";
  const prompt = element("textarea", { name: "prompt", rows: 2, maxlength: limits.prompt_characters, placeholder });
  const label = select("label", [["", "any"], ...labels.map((name) => [name, name])]);
  return {
    nodes: [text && field("Prompt", prompt), labels.length > 0 && field("Class", label)].filter(Boolean),
    read: () => ({
      prompt: (text && prompt.value.trim()) || undefined,
      label: (labels.length > 0 && label.value) || undefined,
    }),
    write(settings) {
      prompt.value = settings.prompt ?? "";
      selectValue(label, settings.label ?? "");
    },
  };
}

/** Return the field of the size of the images: null if the run has one size. */
export function sizeField({ sizes }) {
  const node = select("width", sizes.map(([height, width]) => [`${width}x${height}`, `${width} × ${height}`]));
  return {
    node: sizes.length > 1 ? field("Size", node) : null,
    read() {
      const [width, height] = node.value.split("x").map(Number);
      return sizes.length > 1 ? { width, height } : {};
    },
    write({ width, height }) {
      if (sizes.length > 1) selectValue(node, width && height ? `${width}x${height}` : node.options[0].value);
    },
  };
}

/** Return buttons with example prompts; null if the run takes no prompts. `choose` gets the caption that is clicked. */
export function exampleButtons({ examples, conditioning }, count, choose) {
  const captions = conditioning.text ? examples.slice(0, count) : [];
  if (!captions.length) return null;
  const chip = (caption) => element("button", { type: "button", class: "chip", click: () => choose(caption) }, caption);
  return element("div", { class: "examples", role: "group", "aria-label": "Examples" }, captions.map(chip));
}

/** Show an error of the server beside the field that it names, and focus the field. */
export function showFieldError(form, name, message) {
  clearErrors(form);
  const control = name ? form.elements.namedItem(name) : null;
  if (!control) return;
  const note = element("small", { class: "problem", id: `${control.id}-problem` }, message);
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-errormessage", note.id);
  (control.closest(".pair") ?? control).after(note);
  control.focus();
}

/** Remove all error messages. */
export function clearErrors(form) {
  form.querySelectorAll("small.problem").forEach((note) => note.remove());
  form.querySelectorAll("[aria-invalid]").forEach((control) => control.removeAttribute("aria-invalid"));
}
