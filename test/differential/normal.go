package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	apidiscoveryv2beta1 "k8s.io/api/apidiscovery/v2beta1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	apiregistration "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"sigs.k8s.io/yaml"

	_ "k8s.io/kubernetes/pkg/controlplane" // decoders of every type
)

// masks hide the values that differ between any two servers: identities, times, addresses, revisions.
var masks = []struct {
	pattern *regexp.Regexp
	with    string
}{
	// before the masks of ages, because five random characters may look like an age
	{regexp.MustCompile(`kube-api-access-[a-z0-9]{5}`), "kube-api-access-RANDOM"},
	{regexp.MustCompile(`\b(who-)[a-z0-9]{5}\b`), "${1}RANDOM"},
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`), "UID"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)`), "TIME"},
	{regexp.MustCompile(`(127\.0\.0\.1|192\.0\.2\.1|\d+\.\d+\.\d+\.\d+):\d{4,5}`), "ADDRESS"},
	{regexp.MustCompile(`([eE][yY][jJ])[A-Za-z0-9_-]{10,}(\.[A-Za-z0-9_-]*)*`), "TOKEN"},
	{regexp.MustCompile(`resource version: \d+( \(\d+\))?(, current: \d+)?`), "resource version: RV"},
	{
		regexp.MustCompile(`(precondition failed: UID in precondition: |ResourceVersion in record \(|` +
			`ResourceVersion in the precondition \(|ResourceVersion in precondition: |in object meta: )\S+`),
		"$1ID",
	},
	{regexp.MustCompile(`X509SHA256=[0-9a-f]+`), "CREDENTIAL"},
	{regexp.MustCompile(`\bkubernetes-admin\b`), "admin"},
	{regexp.MustCompile(`current time [0-9-]+ [0-9:.]+ \+0000 UTC m=\+[0-9.]+`), "current time"},
	{regexp.MustCompile(`(resourceVersion\\*":\\*")\d+`), "${1}RV"},
	{regexp.MustCompile(`(resourceVersion=)\d+`), "${1}RV"}, // in requestURI of an audit record
	// An object in an error text: its managers are sorted with a precision of a second. normal sorts and compares the
	// managers of other objects.
	{regexp.MustCompile(`(managedFields\\*":\[)[^\]]*\]`), "${1}…]"},
	{regexp.MustCompile(`(\?hash=)[0-9A-F]+`), "${1}HASH"}, // of an OpenAPI document
	{regexp.MustCompile(`\b10\.9[67]\.\d+\.\d+\b`), "CLUSTERIP"},
}

// applyConflicts matches the text of conflicts of an apply, whose lines have a random order.
var applyConflicts = regexp.MustCompile(`(?s)(Apply failed with \d+ conflicts?: )(.*)`)

// maskedLength is the length in bytes up to which mask keeps its results. Most texts of a run are short, and repeat.
const maskedLength = 256

var masked sync.Map // results of mask by text

// mask returns a text with the masks applied.
func mask(s string) string {
	if len(s) > maskedLength {
		return applyMasks(s)
	}
	if known, ok := masked.Load(s); ok {
		return known.(string)
	}
	result := applyMasks(s)
	masked.Store(s, result)
	return result
}

func applyMasks(s string) string {
	for _, m := range masks {
		s = m.pattern.ReplaceAllString(s, m.with)
	}
	if m := applyConflicts.FindStringSubmatchIndex(s); m != nil {
		lines := strings.FieldsFunc(s[m[4]:], func(r rune) bool { return r == '\n' || r == ' ' })
		slices.Sort(lines)
		s = s[:m[4]] + strings.Join(lines, " ")
	}
	return s
}

// duration matches an age or a duration. The age of whole minutes has no seconds, and no age has seconds after ten
// minutes. It does not match more minutes, because 100m is a quantity.
var duration = regexp.MustCompile(`\b((\d+m)?\d+s|[2-9]m|[1-5]\dm)\b`)

// ageTolerance is the difference of two ages that the start of the servers explains, because they start in sequence.
const ageTolerance = 2 * time.Minute

// sameText reports whether two texts are equal, except for durations that differ little.
func sameText(a, b string) bool {
	if a == b {
		return true
	}
	x, y := duration.FindAllString(a, -1), duration.FindAllString(b, -1)
	if len(x) == 0 || len(x) != len(y) || duration.ReplaceAllString(a, "AGE") != duration.ReplaceAllString(b, "AGE") {
		return false
	}
	for i := range x {
		u, uerr := time.ParseDuration(x[i])
		v, verr := time.ParseDuration(y[i])
		if uerr != nil || verr != nil || (u-v).Abs() > ageTolerance {
			return false
		}
	}
	return true
}

// decode parses a body as JSON, YAML, protobuf or text.
func decode(a answer) any {
	contentType := a.header.Get("Content-Type")
	switch {
	case strings.Contains(contentType, "stream=watch") && strings.Contains(contentType, "json"),
		bytes.Count(a.body, []byte("\n")) > 1 && bytes.HasPrefix(a.body, []byte(`{"type":`)):
		var events []any
		for line := range bytes.Lines(a.body) {
			events = append(events, fromJSON(line))
		}
		return events
	case strings.Contains(contentType, "json"), bytes.HasPrefix(a.body, []byte(`{"paths":`)): // OpenAPI's index is text
		return fromJSON(a.body)
	case strings.Contains(contentType, "yaml"):
		var v any
		if yaml.Unmarshal(a.body, &v) != nil {
			return string(a.body)
		}
		return v
	case strings.Contains(contentType, "protobuf"):
		return fromProtobuf(a.body)
	}
	return string(a.body)
}

func fromJSON(data []byte) any {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	var v any
	if d.Decode(&v) != nil {
		return string(data)
	}
	return v
}

// codecs decode every built-in type, metadata and discovery.
var codecs = func() serializer.CodecFactory {
	scheme := legacyscheme.Scheme
	for _, add := range []func(*runtime.Scheme) error{apidiscoveryv2.AddToScheme, apidiscoveryv2beta1.AddToScheme,
		metav1.AddMetaToScheme, apiextensions.AddToScheme, apiregistration.AddToScheme} {
		if err := add(scheme); err != nil {
			panic(err)
		}
	}
	return serializer.NewCodecFactory(scheme)
}()

func fromProtobuf(data []byte) any {
	obj, _, err := codecs.UniversalDeserializer().Decode(data, nil, nil)
	if err != nil {
		return fmt.Sprintf("%d bytes that are not decoded", len(data))
	}
	converted, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return err.Error()
	}
	return converted
}

// random fields have values that the server chooses, if they match the pattern. pair.follow uses the resource versions
// and continue tokens.
var random = map[string]*regexp.Regexp{
	"uid":                 uid,
	"observedUID":         uid,
	"resourceVersion":     regexp.MustCompile(`^[1-9]\d*$`),
	"clusterIP":           clusterIP,
	"clusterIPs":          regexp.MustCompile(`^\[10\.9[67]\.\d+\.\d+\]$`),
	"nodePort":            nodePort,
	"healthCheckNodePort": nodePort,
	"continue":            regexp.MustCompile(`^[A-Za-z0-9_-]{20,}=*$`),
	"gitCommit":           regexp.MustCompile(`^[0-9a-f]{40}$`),
}

var (
	uid       = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	clusterIP = regexp.MustCompile(`^10\.9[67]\.\d+\.\d+$`)
	nodePort  = regexp.MustCompile(`^3[0-2]\d{3}$`)
)

// unordered lists have no defined order.
var unordered = map[string]bool{"resourceRules": true, "nonResourceRules": true}

// normal returns v without the values that differ between any two servers.
func normal(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for k, e := range v {
			if random[k] != nil && e != nil && random[k].MatchString(fmt.Sprint(e)) {
				out[k] = "RANDOM"
				continue
			}
			if strings.HasPrefix(k, `k:{"uid":`) {
				out[mask(k)] = normal(e)
				continue
			}
			out[k] = normal(e)
			list, ok := out[k].([]any)
			if ok && k == "paths" && !slices.ContainsFunc(list, isObject) {
				out[k] = set(list)
			} else if ok && k == "managedFields" { // the server's order has a precision of a second
				slices.SortFunc(list, func(a, b any) int { return strings.Compare(manager(a), manager(b)) })
			} else if ok && (unordered[k] || k == "resources" && v["groupVersion"] == "diff.example.com/v1" ||
				contains(v["kind"], "ipallocator") || contains(list, "ipallocator") ||
				v["reason"] == nil && k == "causes" && contains(list, "FieldManagerConflict")) {
				slices.SortFunc(list, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
			}
		}
		if g, ok := v["generateName"].(string); ok && g != "" && v["name"] != nil {
			out["name"] = g + "*"
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = normal(e)
		}
		return out
	case string:
		return mask(v)
	case json.Number:
		return v.String()
	case int64, float64:
		return fmt.Sprint(v)
	}
	return v
}

// contains reports whether a text, or a key or text below a value, contains a text.
func contains(v any, text string) bool {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			if strings.Contains(k, text) || contains(e, text) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(v, func(e any) bool { return contains(e, text) })
	case string:
		return strings.Contains(v, text)
	}
	return false
}

func isObject(v any) bool {
	_, ok := v.(map[string]any)
	return ok
}

// set returns a list as a set, so that a difference names an element.
func set(list []any) map[string]any {
	all := map[string]any{}
	for _, e := range list {
		all[fmt.Sprint(e)] = true
	}
	return all
}

// manager identifies an entry of managedFields.
func manager(entry any) string {
	m, _ := entry.(map[string]any)
	return fmt.Sprint(m["manager"], " ", m["operation"], " ", m["subresource"], " ", m["apiVersion"])
}

// differences returns the paths and values that differ.
func differences(at string, a, b any) []string {
	switch x := a.(type) {
	case map[string]any:
		y, ok := b.(map[string]any)
		if !ok {
			break
		}
		var out []string
		keys := maps.Clone(x)
		maps.Copy(keys, y)
		for _, k := range slices.Sorted(maps.Keys(keys)) {
			u, inX := x[k]
			v, inY := y[k]
			switch {
			case !inX:
				out = append(out, fmt.Sprintf("%s.%s: nothing | %s", at, k, short(v)))
			case !inY:
				out = append(out, fmt.Sprintf("%s.%s: %s | nothing", at, k, short(u)))
			case !reflect.DeepEqual(u, v):
				out = append(out, differences(at+"."+k, u, v)...)
			}
		}
		return out
	case []any:
		y, ok := b.([]any)
		if !ok {
			break
		}
		if len(x) != len(y) {
			return []string{fmt.Sprintf("%s: %d of %s | %d of %s",
				at, len(x), short(names(x)), len(y), short(names(y)))}
		}
		var out []string
		for i := range x {
			if !reflect.DeepEqual(x[i], y[i]) {
				out = append(out, differences(fmt.Sprintf("%s[%d]", at, i), x[i], y[i])...)
			}
		}
		return out
	}
	if !sameText(fmt.Sprint(a), fmt.Sprint(b)) {
		return []string{fmt.Sprintf("%s: %s | %s", at, short(a), short(b))}
	}
	return nil
}

// names returns the names of a list's objects. If the elements are not objects, it returns the list.
func names(list []any) any {
	var all []string
	for _, e := range list {
		m, _ := e.(map[string]any)
		if n, ok := m["name"].(string); ok {
			all = append(all, n)
			continue
		}
		meta, ok := m["metadata"].(map[string]any)
		if !ok {
			return list
		}
		all = append(all, fmt.Sprint(meta["name"]))
	}
	return all
}

func short(v any) string {
	b, _ := json.Marshal(v)
	if len(b) > 300 {
		return string(b[:300]) + "…"
	}
	return string(b)
}
