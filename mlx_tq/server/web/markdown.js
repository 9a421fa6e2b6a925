// Markdown to elements. HTML in a text stays text, and what the renderer writes is sanitized all the same.
import { Lexer, Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";  // sets globalThis.DOMPurify
import { button, element, escapeInvisible } from "./elements.js";

const ADDRESS = /^(?:https?|mailto):/i;  // what a link may open
const MAX_INLINE = 8000;  // characters of one paragraph; the renderer takes quadratic time for some texts

const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li",
    "table", "thead", "tbody", "tr", "th", "td", "a"],
  ALLOWED_ATTR: ["href", "align", "start", "class"],
  ALLOWED_URI_REGEXP: ADDRESS,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

class BoundedLexer extends Lexer {
  inlineTokens(text, list = []) {
    if (text.length <= MAX_INLINE) return super.inlineTokens(text, list);
    list.push({ type: "text", raw: text, text, escaped: false });
    return list;
  }
}

const escape = text => text.replace(/[&<>"']/g, c => `&#${c.codePointAt()};`);
const link = (href, text) => ADDRESS.test(href) ? `<a href="${escape(href)}">${text}</a>` : `${text} (${escape(href)})`;

const marked = new Marked({
  breaks: true,
  tokenizer: {
    html: () => undefined,
    tag: text => /^<br ?\/?>/i.test(text) ? { type: "br", raw: text.slice(0, text.indexOf(">") + 1) } : undefined,  // in tables
  },
  renderer: {
    heading({ tokens, depth }) {  // below those of the page
      const level = Math.min(depth + 2, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    link({ href, tokens }) { return link(href, this.parser.parseInline(tokens)); },
    image({ href, text }) { return link(href, `image: ${escape(text || href)}`); },  // nothing is loaded
    checkbox: ({ checked }) => checked ? "\u2611 " : "\u2610 ",
  },
});

function codeBlock(text, language) {
  const block = element("div", "", "code"), bar = element("div", "", "code-bar"), pre = element("pre");
  bar.append(element("span", language), button("Copy", "plain", "copy-code"));
  pre.tabIndex = 0;  // it scrolls
  pre.append(element("code", text));
  block.append(bar, pre);
  return block;
}

const languageOf = text => text?.match(/^[\w+#.-]{1,30}/)?.[0] ?? "";

function sanitize(html) {
  const fragment = DOMPurify.sanitize(html, ALLOWED);
  for (const anchor of fragment.querySelectorAll("a[href]")) {
    const { href, host, textContent } = anchor;
    Object.assign(anchor, { target: "_blank", rel: "noopener noreferrer", title: href });
    if (host && !textContent.includes(host)) anchor.dataset.host = host;  // shown, so that a text cannot hide it
  }
  for (const pre of fragment.querySelectorAll("pre")) {  // in a list or a quotation
    const code = pre.querySelector("code");
    pre.replaceWith(codeBlock(pre.textContent, languageOf(code?.className.replace("language-", ""))));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", "", "table");
    frame.tabIndex = 0;  // it scrolls
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function blocksOf(text) {
  try {
    const blocks = new BoundedLexer(marked.defaults).lex(text), links = JSON.stringify(blocks.links);
    // What a block looks like depends on the links that the text defines anywhere.
    return blocks.filter(({ type }) => type !== "space" && type !== "def").map(block => ({ block, key: block.type + links + block.raw }));
  } catch (error) {
    note(error);
    return [{ block: { type: "plain", raw: text }, key: text }];
  }
}

function nodeOf(block) {
  if (block.type === "code") return codeBlock(block.text, languageOf(block.lang));
  const node = element("div");
  try {
    if (block.type !== "plain") {
      node.append(sanitize(marked.parser([block])));
      return node;
    }
  } catch (error) {
    note(error);
  }
  node.append(element("p", block.raw, "plain-text"));
  return node;
}

// What cannot be rendered is shown as it was written; deep nesting (RangeError) is expected and not logged.
function note(error) {
  if (!(error instanceof RangeError)) console.error(error);
}

// Show `text` in `container`. Only blocks that changed are made again, and a code block that only grew keeps its elements.
export function showMarkdown(container, text) {
  const blocks = blocksOf(escapeInvisible(text));
  blocks.forEach(({ block, key }, place) => {
    const old = container.children[place];
    if (old?.markdown === key) return;
    const code = block.type === "code" && old?.querySelector(":scope > pre > code");
    if (code && old.querySelector("span").textContent === languageOf(block.lang)) {
      code.textContent = block.text;
      old.markdown = key;
      return;
    }
    const node = nodeOf(block);
    node.markdown = key;
    if (old) old.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}
