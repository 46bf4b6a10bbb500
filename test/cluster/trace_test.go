package cluster

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// trace is a request's trace in Jaeger's API.
type trace struct {
	Spans     []span
	Processes map[string]struct{ ServiceName string }
}

// span is a span of a trace. Times are in µs.
type span struct {
	SpanID, OperationName string
	References            []struct{ RefType, SpanID string }
	StartTime, Duration   int64
	ProcessID             string
}

// traces traces a write, and prints its trace from Jaeger.
func (h *hosted) traces() {
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	client, err := rest.HTTPClientFor(h.inner)
	if err != nil {
		h.Fatal(err)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}} // pods require it
	accounts := kubernetes.NewForConfigOrDie(h.inner).CoreV1().ServiceAccounts("default")
	if _, err := accounts.Create(h.Context(), account, metav1.CreateOptions{}); err != nil {
		h.Fatal(err)
	}
	req, err := http.NewRequestWithContext(h.Context(), http.MethodPost, h.inner.Host+"/api/v1/namespaces/default/pods",
		strings.NewReader(`{"metadata":{"name":"traced"},"spec":{"containers":[{"name":"traced","image":"traced"}]}}`))
	if err != nil {
		h.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Traceparent", "00-"+id+"-00f067aa0ba902b7-01")
	resp, err := client.Do(req)
	if err != nil {
		h.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusCreated {
		h.Fatalf("the pod that is traced: %s", resp.Status)
	}
	address := h.outer.Kubectl("-n", "watershed", "get", "service", "jaeger", "-o", "jsonpath={.spec.clusterIP}")
	var t trace
	harness.Eventually(h, harness.Soon, func() error {
		resp, err := http.Get("http://" + address + ":16686/api/traces/" + id)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		var answer struct{ Data []trace }
		if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
			return err
		}
		if len(answer.Data) != 1 {
			return fmt.Errorf("Jaeger has %d traces", len(answer.Data))
		}
		t = answer.Data[0]
		missing := map[string]bool{
			"gateway: POST /api/v1/namespaces/{:namespace}/pods": true,
			"authz: watershed.authz.v1.Authz/Authorize":          true,
			"admission: watershed.admission.v1.Admission/Admit":  true,
			"registry: Create etcd3":                             true,
			"registry: publish pods":                             true,
			"watchfanout: apply":                                 true,
			"gateway: deliver":                                   true,
		}
		for _, s := range t.Spans {
			process := t.Processes[s.ProcessID].ServiceName
			maps.DeleteFunc(missing, func(span string, _ bool) bool {
				service, operation, _ := strings.Cut(span, ": ")
				if h.placement == "compact" && service != "watchfanout" {
					service = "watershed" // a process of several services
				}
				return process == service && s.OperationName == operation
			})
		}
		if len(missing) > 0 {
			return fmt.Errorf("Jaeger lacks %v", missing)
		}
		return nil
	})
	fmt.Print(t.picture())
}

// picture draws a trace: the start and duration of each span in ms, indented below its parent.
func (t *trace) picture() string {
	slices.SortFunc(t.Spans, func(a, b span) int { return cmp.Compare(a.StartTime, b.StartTime) })
	depth := map[string]int{}
	var out strings.Builder
	for _, s := range t.Spans {
		for _, r := range s.References {
			if parent, ok := depth[r.SpanID]; ok && r.RefType == "CHILD_OF" {
				depth[s.SpanID] = parent + 1
			}
		}
		if _, ok := depth[s.SpanID]; !ok {
			depth[s.SpanID] = 0
		}
		fmt.Fprintf(
			&out,
			"%7.2f %7.2f  %-11s %s%s\n",
			float64(s.StartTime-t.Spans[0].StartTime)/1e3,
			float64(s.Duration)/1e3,
			t.Processes[s.ProcessID].ServiceName,
			strings.Repeat("  ", depth[s.SpanID]),
			s.OperationName,
		)
	}
	return out.String()
}
