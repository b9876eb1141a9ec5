// The command about itself, from its verbs and options: --help with examples first, `octile completion`, and `octile
// manual`, of which the build makes the man page, and docs/reference/command.md is made.
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cli/cli.h"
#include "octile/octile.h"

namespace octile::cli {
namespace {

constexpr std::string_view kExamples = "Examples:\n";

// A footer ends with its examples.
std::string without_examples(const std::string& footer) {
  const std::size_t at = footer.find(kExamples);
  if (at == std::string::npos) return footer;
  const std::size_t end = footer.find_last_not_of('\n', at == 0 ? 0 : at - 1);
  return at == 0 ? "" : footer.substr(0, end + 1);
}

std::string examples(const std::string& footer) {
  const std::size_t at = footer.find(kExamples);
  return at == std::string::npos ? "" : footer.substr(at + kExamples.size());
}

class ExamplesFirst : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* app, std::string name) const override {
    const std::string shown = examples(app->get_footer());
    return CLI::Formatter::make_usage(app, name) + (shown.empty() ? "" : "\n" + std::string(kExamples) + shown + "\n");
  }
  std::string make_footer(const CLI::App* app) const override {
    const std::string rest = without_examples(app->get_footer());
    return rest.empty() ? "" : rest + "\n";
  }
};

// ---- The verbs, as pages of a manual ----

struct Page {
  std::string name;  // "octile puzzles run"
  const CLI::App* app;
};

void collect(const CLI::App& app, const std::string& parent, std::vector<Page>& pages) {
  const std::string name = parent.empty() ? app.get_name() : parent + " " + app.get_name();
  pages.push_back({name, &app});
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!verb->get_group().empty()) collect(*verb, name, pages);
  }
}

std::vector<Page> pages_of(const CLI::App& app) {
  std::vector<Page> pages;
  collect(app, "", pages);
  return pages;
}

// A verb that says nothing of its own has the footer of the verb above it, which need not be shown again.
std::string own_footer(const Page& page) {
  const std::string footer = page.app->get_footer();
  return page.app->get_parent() != nullptr && page.app->get_parent()->get_footer() == footer ? "" : footer;
}

std::vector<const CLI::Option*> options(const CLI::App& app, bool positional) {
  std::vector<const CLI::Option*> found;
  for (const CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    if (option->get_positional() == positional && !option->get_group().empty()) found.push_back(option);
  }
  return found;
}

// "cpu cuda" of "TEXT:{cpu,cuda}".
std::string values_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const std::size_t open = type.find('{'), close = type.find('}');
  if (open == std::string::npos || close == std::string::npos) return "";
  std::string values = type.substr(open + 1, close - open - 1);
  for (char& c : values) c = c == ',' ? ' ' : c;
  return values;
}

bool takes_value(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

// "-q, --quiet", "--device {cpu,cuda}", "SHAPE".
std::string heading(const CLI::Option& option) {
  std::string text;
  for (const std::string& name : option.get_snames()) text += (text.empty() ? "-" : ", -") + name;
  for (const std::string& name : option.get_lnames()) text += (text.empty() ? "--" : ", --") + name;
  if (text.empty()) text = option.get_single_name();
  if (takes_value(option) && !option.get_positional()) {
    const std::string type = option.get_type_name();
    const std::size_t open = type.find('{');
    text += " " + (open == std::string::npos ? type : type.substr(open));
  }
  return text;
}

std::string paragraph_at(const std::string& text, std::size_t& at) {
  const std::size_t end = std::min(text.find("\n\n", at), text.size());
  const std::string part = text.substr(at, end - at);
  at = std::min(end + 2, text.size());
  return part;
}

// Whether line breaks and columns of a paragraph mean something.
bool is_laid_out(const std::string& paragraph) {
  return paragraph.find("\n  ") != std::string::npos || paragraph.starts_with("  ");
}

// ---- A man page ----

std::string roff(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool first = i == 0 || text[i - 1] == '\n';
    if (first && (text[i] == '.' || text[i] == '\'')) out += "\\&";
    if (text[i] == '\\') {
      out += "\\e";
    } else if (text[i] == '-') {
      out += "\\-";
    } else {
      out += text[i];
    }
  }
  return out;
}

void roff_paragraphs(std::ostream& out, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::string part = paragraph_at(text, at);
    if (is_laid_out(part)) {
      out << ".PP\n.nf\n" << roff(part) << "\n.fi\n";
    } else {
      out << ".PP\n" << roff(part) << "\n";
    }
  }
}

void write_man(std::ostream& out, const CLI::App& app) {
  out << ".TH OCTILE 1 \"\" \"octile " << octile_version() << "\" \"User commands\"\n.SH NAME\noctile \\- "
      << "quantized linear layers, forward and backward\n.SH SYNOPSIS\n.B octile\n.I COMMAND\n[OPTIONS]\n";
  for (const Page& page : pages_of(app)) {
    const bool top = page.app == &app;
    if (!top) out << ".SH " << roff(page.name) << "\n";
    if (top) out << ".SH DESCRIPTION\n";
    roff_paragraphs(out, page.app->get_description());
    const std::string shown = examples(own_footer(page));
    if (!shown.empty()) out << ".PP\nExamples:\n.PP\n.nf\n" << roff(shown) << "\n.fi\n";
    for (const bool positional : {true, false}) {
      for (const CLI::Option* option : options(*page.app, positional)) {
        out << ".TP\n.B " << roff(heading(*option)) << "\n" << roff(option->get_description()) << "\n";
      }
    }
    roff_paragraphs(out, without_examples(own_footer(page)));
  }
}

// ---- docs/reference/command.md ----

std::string markdown(const std::string& text) {
  std::string out;
  bool code = false;
  for (const char c : text) {
    code ^= c == '`';
    if (!code && (c == '<' || c == '*' || c == '_' || c == '|')) out += '\\';
    out += c;
  }
  return out;
}

void markdown_paragraphs(std::ostream& out, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    std::string part = paragraph_at(text, at);
    while (part.ends_with('\n')) part.pop_back();
    if (is_laid_out(part)) {
      out << "```\n" << part << "\n```\n\n";
    } else {
      out << markdown(part) << "\n\n";
    }
  }
}

// Examples as lines of a shell: text after two spaces becomes a comment.
std::string shell_lines(const std::string& shown) {
  std::istringstream lines(shown);
  std::string out;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t start = line.find_first_not_of(' ');
    if (start == std::string::npos) continue;
    std::string command = start <= 2 ? line.substr(start) : "";
    std::string comment = start <= 2 ? "" : line.substr(start);
    if (const std::size_t gap = command.find("  "); gap != std::string::npos) {
      comment = command.substr(command.find_first_not_of(' ', gap));
      command.resize(gap);
    }
    out += command + (comment.empty() ? "" : std::string(command.empty() ? "" : "  ") + "# " + comment) + "\n";
  }
  return out;
}

void write_markdown(std::ostream& out, const CLI::App& app) {
  out << "# The command\n\nMade by `octile manual markdown`; `octile --help`, `octile COMMAND --help` and `man octile` "
         "say the same.\n\n";
  for (const Page& page : pages_of(app)) {
    if (page.app != &app) out << "## " << page.name << "\n\n";
    markdown_paragraphs(out, page.app->get_description());
    const std::string shown = examples(own_footer(page));
    if (!shown.empty()) out << "```sh\n# needs: the files that it names\n" << shell_lines(shown) << "```\n\n";
    out << "| option | |\n| --- | --- |\n";
    for (const bool positional : {true, false}) {
      for (const CLI::Option* option : options(*page.app, positional)) {
        out << "| `" << heading(*option) << "` | " << markdown(option->get_description()) << " |\n";
      }
    }
    out << "\n";
    markdown_paragraphs(out, without_examples(own_footer(page)));
  }
}

// ---- Completion ----

std::string quoted(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return "'" + out + "'";
}

std::string words_of(const Page& page) {
  std::string words;
  for (const CLI::App* verb : page.app->get_subcommands([](const CLI::App*) { return true; })) {
    if (!verb->get_group().empty()) words += verb->get_name() + " ";
  }
  for (const CLI::Option* option : options(*page.app, false)) {
    for (const std::string& name : option->get_lnames()) words += "--" + name + " ";
  }
  for (const CLI::Option* option : options(*page.app, true)) words += values_of(*option) + " ";
  return words;
}

// zsh runs it by bashcompinit; path and words mean something else to zsh. Where nothing is proposed, file names are.
void write_bash(std::ostream& out, const CLI::App& app, bool zsh) {
  if (zsh) out << "#compdef octile\nautoload -U +X bashcompinit && bashcompinit\n";
  out << "_octile_proposals() {\n"
         "  local word verb=octile proposed='' current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}\n"
         "  for word in \"${COMP_WORDS[@]:1:$((COMP_CWORD-1))}\"; do\n    case \"$verb $word\" in\n";
  const std::vector<Page> pages = pages_of(app);
  std::string names;
  for (const Page& page : pages) {
    if (page.app != &app) names += (names.empty() ? "'" : "' | '") + page.name;
  }
  out << "      " << names << "') verb=\"$verb $word\" ;;\n    esac\n  done\n  case \"$verb $before\" in\n";
  for (const Page& page : pages) {
    for (const CLI::Option* option : options(*page.app, false)) {
      if (!takes_value(*option)) continue;
      for (const std::string& name : option->get_lnames()) {
        out << "    '" << page.name << " --" << name << "') COMPREPLY=($(compgen -W " << quoted(values_of(*option))
            << " -- \"$current\")); return ;;\n";
      }
    }
  }
  out << "  esac\n  case $verb in\n";
  for (const Page& page : pages) out << "    '" << page.name << "') proposed=" << quoted(words_of(page)) << " ;;\n";
  out << "  esac\n  COMPREPLY=($(compgen -W \"$proposed\" -- \"$current\"))\n}\n"
         "complete -o default -F _octile_proposals octile\n";
  if (zsh) out << "[[ $funcstack[1] = _octile ]] && _bash_complete -o default -F _octile_proposals\n";  // the first Tab
}

void write_fish(std::ostream& out, const CLI::App& app) {
  for (const Page& page : pages_of(app)) {
    std::string when = "__fish_use_subcommand";
    if (page.app != &app) {
      when.clear();
      std::istringstream words(page.name.substr(page.name.find(' ') + 1));
      for (std::string word; words >> word;)
        when += (when.empty() ? "" : "; and ") + ("__fish_seen_subcommand_from " + word);
    }
    for (const CLI::App* verb : page.app->get_subcommands([](const CLI::App*) { return true; })) {
      if (verb->get_group().empty()) continue;
      out << "complete -c octile -n '" << when << "' -a " << verb->get_name() << " -d "
          << quoted(verb->get_description()) << "\n";
    }
    for (const CLI::Option* option : options(*page.app, false)) {
      out << "complete -c octile -n '" << when << "'";
      for (const std::string& name : option->get_snames()) out << " -s " << name;
      for (const std::string& name : option->get_lnames()) out << " -l " << name;
      if (takes_value(*option)) out << (values_of(*option).empty() ? " -r" : " -xa " + quoted(values_of(*option)));
      out << " -d " << quoted(option->get_description()) << "\n";
    }
  }
}

constexpr const char* kCompletionFooter =
    R"(Writes a script to the standard output that completes commands, options and their values. The
package installs it; from a build folder, source it.

Examples:
  source <(octile completion bash)
  octile completion zsh > ~/.zsh/completions/_octile
  octile completion fish > ~/.config/fish/completions/octile.fish)";

}  // namespace

std::shared_ptr<CLI::FormatterBase> examples_first() { return std::make_shared<ExamplesFirst>(); }

void add_manual(CLI::App& app) {
  CLI::App* completion = app.add_subcommand("completion", "Write a script for a shell that completes the command line");
  completion->footer(kCompletionFooter);
  auto shell = std::make_shared<std::string>();
  completion->add_option("SHELL", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  completion->callback([&app, shell] {
    if (*shell == "fish") {
      write_fish(std::cout, app);
    } else {
      write_bash(std::cout, app, *shell == "zsh");
    }
  });
  CLI::App* manual = app.add_subcommand("manual", "Write all pages of the manual")->group("");
  auto format = std::make_shared<std::string>();
  manual->add_option("FORMAT", *format, "man or markdown")->required()->check(CLI::IsMember({"man", "markdown"}));
  manual->callback([&app, format] {
    if (*format == "man") {
      write_man(std::cout, app);
    } else {
      write_markdown(std::cout, app);
    }
  });
}

}  // namespace octile::cli
