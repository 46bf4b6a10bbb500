package admission

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/rpc"
)

// A mutating webhook's patch may copy no more than a client's patch. With failurePolicy Fail the review fails, and the
// object does not grow.
func TestAWebhooksCopiesAreBounded(t *testing.T) {
	var ops []string
	for i := range 20 { // 12 MB without the bound
		ops = append(ops, fmt.Sprintf(`{"op":"copy","from":"/data","path":"/data/x%d"}`, i))
	}
	patch := base64.StdEncoding.EncodeToString([]byte("[" + strings.Join(ops, ",") + "]"))
	hook := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var review struct{ Request struct{ UID string } }
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil {
			t.Error(err)
		}
		fmt.Fprintf(w, `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":%q,`+
			`"allowed":true,"patchType":"JSONPatch","patch":%q}}`, review.Request.UID, patch)
	}))
	t.Cleanup(hook.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: hook.Certificate().Raw})
	a := chain(t, cluster{"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations": {fmt.Sprintf(
		`{"metadata":{"name":"m"},"webhooks":[{"name":"m.example.com","admissionReviewVersions":["v1"],`+
			`"sideEffects":"None","failurePolicy":"Fail","matchPolicy":"Equivalent","timeoutSeconds":10,`+
			`"namespaceSelector":{},"objectSelector":{},"clientConfig":{"url":%q,"caBundle":%q},`+
			`"rules":[{"scope":"*","operations":["CREATE"],"apiGroups":[""],"apiVersions":["v1"],`+
			`"resources":["configmaps"]}]}]}`,
		hook.URL, base64.StdEncoding.EncodeToString(ca))}})
	v, err := a.Admit(t.Context(), creationOf("ConfigMap", "configmaps", "x",
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"n","namespace":"x"},"data":{"k":"v"}}`))
	if err == nil || !strings.Contains(err.Error(), "copy") {
		t.Errorf("the patch is applied: %d bytes, %v", len(v.GetObject()), err)
	}
}

// A MutatingAdmissionPolicy's JSONPatch may copy no more than a client's patch. The CEL budget bounds the number of its
// operations, not the bytes that they copy.
func TestAPolicysCopiesAreBounded(t *testing.T) {
	var ops []string
	for i := range 20 { // 12 MB without the bound
		ops = append(ops, fmt.Sprintf(`JSONPatch{op: "copy", from: "/data", path: "/data/x%d"}`, i))
	}
	const path = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolic"
	a := chain(t, cluster{
		path + "ies": {fmt.Sprintf(
			`{"metadata":{"name":"p"},"spec":{"failurePolicy":"Fail","reinvocationPolicy":"Never",`+
				`"matchConstraints":{"matchPolicy":"Equivalent","namespaceSelector":{},"objectSelector":{},`+
				`"resourceRules":[{"scope":"*","operations":["CREATE"],"apiGroups":[""],"apiVersions":["v1"],`+
				`"resources":["configmaps"]}]},`+
				`"mutations":[{"patchType":"JSONPatch","jsonPatch":{"expression":%q}}]}}`,
			"["+strings.Join(ops, ",")+"]")},
		path + "ybindings":   {`{"metadata":{"name":"b"},"spec":{"policyName":"p"}}`},
		"/openapi/v3":        {`{"paths":{"api/v1":{"serverRelativeURL":"/openapi/v3/api/v1?hash=1"}}}`},
		"/openapi/v3/api/v1": {`{"openapi":"3.0.0","components":{"schemas":{}}}`},
	})
	review := creationOf("ConfigMap", "configmaps", "x",
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"n","namespace":"x"},"data":{"k":"v"}}`)
	v, err := a.Admit(t.Context(), review)
	for until := time.Now().Add(2 * time.Minute); apierrors.IsServiceUnavailable(rpc.FromStatus(err)); {
		if time.Now().After(until) { // upstream's plugin reads OpenAPI at its start
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
		v, err = a.Admit(t.Context(), review)
	}
	if err == nil || !strings.Contains(err.Error(), "copy") {
		t.Errorf("the patch is applied: %d bytes, %v", len(v.GetObject()), err)
	}
}
