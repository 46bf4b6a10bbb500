package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/test/harness"
	"watershed.dev/test/node"
)

// autoscale checks that the watch tier's HorizontalPodAutoscaler scales it by its pods' metrics. It scales up while the
// watches exceed the target, and down when they no longer do.
func (h *hosted) autoscale(c *clients) {
	h.Helper()
	h.customMetrics()
	file := filepath.Join(harness.Root(), "deploy", "k8s", "components", "autoscaling", "watchfanout.yaml")
	h.outer.Kubectl("-n", "watershed", "apply", "-f", file)
	const patch = `{"spec":{"minReplicas":1,"maxReplicas":3,` +
		`"behavior":{"scaleDown":{"stabilizationWindowSeconds":0}},` +
		`"metrics":[{"type":"Pods","pods":{"metric":{"name":"watershed_watchfanout_watchers"},` +
		`"target":{"type":"AverageValue","averageValue":"%d"}}}]}}`
	want := func(of, replicas int) func() {
		return func() {
			h.outer.Kubectl(
				"-n",
				"watershed",
				"patch",
				"hpa",
				"watchfanout",
				"--type=merge",
				"-p",
				fmt.Sprintf(patch, of),
			)
			h.has("watchfanout", replicas)
		}
	}
	h.phase(c, "watchfanout by its HPA to 3", true, want(3, 3))
	h.phase(c, "watchfanout by its HPA to 1", true, want(1000, 1))
	h.outer.Kubectl("-n", "watershed", "delete", "hpa", "watchfanout")
}

// has waits until a Deployment has exactly that number of pods, all of them ready.
func (h *hosted) has(service string, replicas int) {
	h.Helper()
	harness.Eventually(h, 5*time.Minute, func() error {
		out := h.outer.Kubectl("-n", "watershed", "get", "deployment", service, "-o",
			"jsonpath={.spec.replicas} {.status.readyReplicas} {.status.replicas}")
		if want := strings.TrimSpace(strings.Repeat(fmt.Sprint(replicas)+" ", 3)); out != want {
			hpa, _ := h.outer.TryKubectl("", "-n", "watershed", "describe", "hpa", service)
			return fmt.Errorf("%s: %s\n%s", service, out, hpa)
		}
		// terminating pods have gone
		pods := h.outer.Kubectl("-n", "watershed", "get", "pods", "-l", "app.kubernetes.io/name="+service, "-o", "name")
		if n := len(strings.Fields(pods)); n != replicas {
			return fmt.Errorf("%d pods of %s", n, service)
		}
		return nil
	})
	h.rollout("watershed", "deployment/"+service)
}

// customMetrics registers and serves custom.metrics.k8s.io as an adapter does, with the pods' current values.
func (h *hosted) customMetrics() {
	h.Helper()
	certificate := h.selfSigned()
	l, err := tls.Listen("tcp", net.JoinHostPort(node.Address, "0"), &tls.Config{
		Certificates: []tls.Certificate{certificate},
		MinVersion:   tls.VersionTLS12,
	})
	if err != nil {
		h.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(h.serveMetrics), ReadHeaderTimeout: time.Minute}
	go func() { _ = srv.Serve(l) }()
	h.Cleanup(func() { srv.Close() })
	h.outer.Apply(fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: metrics, namespace: default}
spec: {ports: [{port: 443}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: metrics, namespace: default, labels: {kubernetes.io/service-name: metrics}}
addressType: IPv4
ports: [{port: %d}]
endpoints: [{addresses: [%s]}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1beta2.custom.metrics.k8s.io}
spec:
  group: custom.metrics.k8s.io
  version: v1beta2
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
  service: {name: metrics, namespace: default}
`, l.Addr().(*net.TCPAddr).Port, node.Address))
}

const metricsPath = "/apis/custom.metrics.k8s.io/v1beta2"

// serveMetrics serves discovery, and one metric of the pods that a selector matches.
func (h *hosted) serveMetrics(w http.ResponseWriter, req *http.Request) {
	answer := func(doc any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(doc)
	}
	if req.URL.Path == metricsPath {
		answer(metav1.APIResourceList{
			TypeMeta:     metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"},
			GroupVersion: "custom.metrics.k8s.io/v1beta2",
		})
		return
	}
	parts := strings.Split(strings.TrimPrefix(req.URL.Path, metricsPath+"/namespaces/"), "/")
	if len(parts) != 4 {
		http.NotFound(w, req)
		return
	}
	namespace, metric := parts[0], parts[3]
	pods, err := h.outer.Client().CoreV1().Pods(namespace).List(req.Context(),
		metav1.ListOptions{LabelSelector: req.URL.Query().Get("labelSelector")})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	type object = map[string]any
	items := []object{}
	for _, p := range pods.Items {
		n, err := scrape(p.Status.PodIP, metric)
		if err != nil {
			continue // it is starting or terminating
		}
		items = append(items, object{
			"describedObject": object{"kind": "Pod", "namespace": namespace, "name": p.Name, "apiVersion": "v1"},
			"metric":          object{"name": metric},
			"timestamp":       metav1.Now(),
			"value":           resource.NewMilliQuantity(int64(n*1000), resource.DecimalSI),
		})
	}
	answer(object{
		"kind":       "MetricValueList",
		"apiVersion": "custom.metrics.k8s.io/v1beta2",
		"metadata":   object{},
		"items":      items,
	})
}

// scrape returns a pod's metric, summed over its labels.
func scrape(address, metric string) (sum float64, err error) {
	client := &http.Client{Timeout: time.Second}
	resp, err := client.Get("http://" + net.JoinHostPort(address, "8081") + "/metrics")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	for _, m := range regexp.MustCompile(`(?m)^`+metric+`(?:\{.*\})? (\S+)$`).FindAllStringSubmatch(string(text), -1) {
		var n float64
		if _, err := fmt.Sscan(m[1], &n); err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

func (h *hosted) selfSigned() tls.Certificate {
	h.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		h.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		h.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
