// Fields of the forms: each with a label, and a place for what is wrong with it.

import { element, unique } from "./dom.js";

/** A labelled control. */
export function field(label, control, hint = null) {
  control.id = unique(control.name);
  const note = hint === null ? null : element("small", { id: `${control.id}-hint` }, hint);
  if (note) control.setAttribute("aria-describedby", note.id);
  return element("div", { class: "field" }, element("label", { for: control.id }, label), control, note);
}

/** A number within limits. */
export function number(name, { min, max, step = 1, value }) {
  const mode = step === 1 ? "numeric" : "decimal";
  return element("input", { type: "number", inputmode: mode, name, min, max, step, value, required: true });
}

/** A choice among [value, text] pairs. */
export function choice(name, options) {
  const node = element("select", { name });
  offer(node, options);
  return node;
}

/** Offer these [value, text] pairs, and keep what is chosen if it is among them. */
export function offer(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

/** Choose a value, which need not be on offer: a link may name any. */
export function choose(select, value) {
  if (![...select.options].some((option) => option.value === value)) {
    select.append(element("option", { value }, value));
  }
  select.value = value;
}

/** What a run can be told: a prompt, a class, or both. */
export function subjectFields({ conditions: { text, labels }, limits }) {
  const hint = "anything you like";
  const prompt = element("textarea", { name: "prompt", rows: 2, maxlength: limits.prompt, placeholder: hint });
  const label = choice("label", [["", "any"], ...labels.map((name) => [name, name])]);
  return {
    nodes: [text && field("Prompt", prompt), labels.length > 0 && field("Class", label)].filter(Boolean),
    read: () => ({
      prompt: (text && prompt.value.trim()) || undefined,
      label: (labels.length > 0 && label.value) || undefined,
    }),
    write(settings) {
      prompt.value = settings.prompt ?? "";
      choose(label, settings.label ?? "");
    },
  };
}

/** Captions to try, where the run can be told any; `take` is told the one that is clicked. */
export function examples({ examples: known, conditions }, most, take) {
  const captions = conditions.text ? known.slice(0, most) : [];
  if (!captions.length) return null;
  const chip = (caption) => element("button", { type: "button", class: "chip", click: () => take(caption) }, caption);
  return element("div", { class: "examples", role: "group", "aria-label": "Examples to try" }, captions.map(chip));
}

/** Say what is wrong beside the field that the server names, and put the focus there. */
export function complain(form, name, message) {
  clear(form);
  const control = name ? form.elements.namedItem(name) : null;
  if (!control) return;
  const note = element("small", { class: "problem", id: `${control.id}-problem` }, message);
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-errormessage", note.id);
  (control.closest(".pair") ?? control).after(note);
  control.focus();
}

/** Nothing is wrong any more. */
export function clear(form) {
  form.querySelectorAll("small.problem").forEach((note) => note.remove());
  form.querySelectorAll("[aria-invalid]").forEach((control) => control.removeAttribute("aria-invalid"));
}
