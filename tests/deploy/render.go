// Renders a chart's templates as Helm does, as far as this chart goes: the same template engine, the few functions that
// it uses, and JSON where Helm writes YAML. Input: {"values", "files", "chart", "release"}; output: file -> text.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strings"
	"text/template"
)

type input struct {
	Values  map[string]any
	Files   map[string]string
	Chart   map[string]any
	Release map[string]any
}

func number(v any) int {
	var n int
	if _, err := fmt.Sscanf(fmt.Sprint(v), "%d", &n); err != nil {
		panic(fmt.Sprintf("%v is no number", v))
	}
	return n
}

func main() {
	var in input
	if err := json.NewDecoder(os.Stdin).Decode(&in); err != nil {
		panic(err)
	}
	all := template.New("chart").Option("missingkey=error")
	all.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var out bytes.Buffer
			err := all.ExecuteTemplate(&out, name, data)
			return out.String(), err
		},
		"toYaml": func(v any) (string, error) {
			out, err := json.Marshal(v)
			return string(out), err
		},
		"nindent": func(n int, s string) string {
			pad := "\n" + strings.Repeat(" ", n)
			return pad + strings.ReplaceAll(s, "\n", pad)
		},
		"quote":      func(v any) string { return fmt.Sprintf("%q", fmt.Sprint(v)) },
		"trunc":      func(n int, s string) string { return s[:min(n, len(s))] },
		"trimSuffix": func(end, s string) string { return strings.TrimSuffix(s, end) },
		"lower":      strings.ToLower,
		"add":        func(a, b any) int { return number(a) + number(b) },
		"div":        func(a, b any) int { return number(a) / number(b) },
		"fail":       func(text string) (string, error) { return "", fmt.Errorf("%s", text) },
	})
	names := []string{}
	for name := range in.Files {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		template.Must(all.New(name).Parse(in.Files[name]))
	}
	out := map[string]string{}
	for _, name := range names {
		var text bytes.Buffer
		data := map[string]any{"Values": in.Values, "Chart": in.Chart, "Release": in.Release}
		if err := all.ExecuteTemplate(&text, name, data); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		out[name] = text.String()
	}
	json.NewEncoder(os.Stdout).Encode(out)
}
