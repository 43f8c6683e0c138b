#include "declarations.h"

#include <cctype>
#include <cstring>

namespace hep::ptxm {
namespace {

u32 round_up(u32 n, u32 to) {
  return (n + to - 1) / to * to;
}

class Declarer {
 public:
  Declarer(Tokens& tokens, std::string name) : t_(tokens) { d_.module->name = std::move(name); }

  Declared run() {
    bool function = false, entry = false;
    while (!t_.peek().text.empty()) {
      const std::string_view t = t_.peek().text;
      if (t == ".version" || t == ".address_size") {
        t_.take();
        t_.take();
      } else if (t == ".target") {
        t_.take();
        target(t_.take());
      } else if (t == ".file")
        file();
      else if (t == ".visible" || t == ".weak" || t == ".extern")
        t_.take();
      else if (t == ".entry" || t == ".func") {
        entry = t == ".entry";
        function = true;
        t_.take();
      } else if (function) {
        declare_function(entry);
        function = false;
      } else if (t == ".shared" || t == ".global" || t == ".const") {
        t_.take();
        variable(t);
      } else
        t_.fail("unknown declaration '" + std::string(t) + "'");
    }
    u32 begin = shared_;  // of dynamic shared memory
    for (auto& [name, align] : dynamic_) d_.symbols[name] = kSharedBase + (begin = round_up(shared_, align));
    for (Body& b : d_.bodies) b.kernel.static_shared = begin;
    return std::move(d_);
  }

 private:
  void target(std::string_view t) {
    if (t.substr(0, 3) != "sm_") t_.fail("unknown target");
    size_t n = 3;
    while (n < t.size() && std::isdigit(u8(t[n]))) ++n;
    d_.module->target = t_.parse<u32>(t.substr(3, n - 3), 10);
  }
  void file() {
    t_.take();
    const u32 n = t_.take_u32();
    std::string_view path = t_.take();
    path = path.substr(1, path.size() - 2);
    path = path.substr(path.rfind('/') + 1);
    if (d_.module->files.size() <= n) d_.module->files.resize(n + 1);
    d_.module->files[n] = path;
    while (t_.accept(",")) t_.take();  // time and size
  }
  void variable(std::string_view space) {
    u32 align = 1, bytes = 0, count = 1;
    for (; t_.peek().text[0] == '.'; t_.take()) {
      if (t_.is(".align")) {
        t_.take();
        align = u32(t_.number(t_.peek().text));
      } else if (u8 n = type_bytes(t_.peek().text.substr(1)))
        bytes = n;
      else
        t_.fail("unknown attribute of a variable");
    }
    const std::string_view name = t_.take();
    if (t_.accept("[")) {
      count = t_.is("]") ? 0 : t_.take_u32();
      t_.expect("]");
    }
    align = std::max(align, bytes);
    if (space == ".shared") {
      const u32 at = round_up(shared_, align);
      d_.symbols[name] = kSharedBase + at;
      if (count)
        shared_ = at + count * bytes;
      else
        dynamic_.push_back({name, align});
    } else {
      auto data = std::make_shared<std::vector<u64>>(u64(count) * bytes / 8 + 2);
      u8* base = reinterpret_cast<u8*>(data->data());
      if (t_.accept("=")) initial_values(base, bytes, count);
      d_.symbols[name] = reinterpret_cast<u64>(base);
      d_.module->variables.push_back({std::string(name), base, u64(count) * bytes});
      d_.storage.push_back(std::move(data));
    }
    t_.expect(";");
  }
  void initial_values(u8* base, u32 bytes, u32 count) {
    const bool list = t_.accept("{");
    for (u32 k = 0; k < count && !t_.is("}"); ++k) {
      const u64 v = t_.number(t_.take());
      std::memcpy(base + u64(k) * bytes, &v, bytes);
      if (!t_.accept(",")) break;
    }
    if (list) t_.expect("}");
  }
  void declare_function(bool entry) {
    Body b{};
    b.entry = entry;
    b.name = t_.take();
    if (b.name == "(") t_.fail("a function with a result");
    b.kernel.name = b.name;
    if (t_.accept("(")) parameters(b);
    for (; !t_.is("{") && !t_.is(";"); t_.take()) {
      if (t_.is(".maxntid")) {
        t_.take();
        b.kernel.max_threads = u32(t_.number(t_.peek().text));
        while (t_.peek(1).text == ",") {
          t_.take();
          t_.take();
          b.kernel.max_threads *= u32(t_.number(t_.peek().text));
        }
      } else if (t_.is(".minnctapersm")) {
        t_.take();
        b.kernel.min_blocks = u32(t_.number(t_.peek().text));
      } else {
        t_.fail("unknown directive '" + std::string(t_.peek().text) + "'");
      }
    }
    if (t_.accept(";")) return;
    t_.expect("{");
    b.at = t_.place();
    for (int depth = 1; depth;) {
      const std::string_view t = t_.take();
      if (t.empty()) t_.fail("a function without an end");
      depth += t == "{" ? 1 : t == "}" ? -1 : 0;
    }
    d_.bodies.push_back(std::move(b));
  }
  void parameters(Body& b) {
    u32 end = 0;
    while (!t_.accept(")")) {
      u32 align = 1, bytes = 0, count = 1;
      for (t_.expect(".param"); t_.peek().text[0] == '.'; t_.take()) {
        if (t_.is(".align")) {
          t_.take();
          align = u32(t_.number(t_.peek().text));
        } else if (t_.is(".ptr") || t_.is(".global"))
          continue;
        else if (u8 n = type_bytes(t_.peek().text.substr(1)))
          bytes = n;
        else
          t_.fail("unknown attribute of a parameter");
      }
      const std::string name(t_.take());
      if (t_.accept("[")) {
        count = t_.take_u32();
        t_.expect("]");
      }
      align = b.entry ? std::max(align, bytes) : 8;
      end = round_up(end, align);
      b.kernel.params.push_back({name, end, bytes * count});
      if (!b.entry) b.args.push_back({name, d_.program->frame_bytes + end, bytes * count});
      end += bytes * count;
      t_.accept(",");
    }
    b.kernel.param_bytes = end;
    if (!b.entry) d_.program->frame_bytes += round_up(end, 8);
  }

  Tokens& t_;
  Declared d_;
  std::vector<std::pair<std::string_view, u32>> dynamic_;
  u32 shared_ = 0;
};

}  // namespace

Declared declare_all(Tokens& tokens, std::string name) {
  return Declarer(tokens, std::move(name)).run();
}

}  // namespace hep::ptxm
