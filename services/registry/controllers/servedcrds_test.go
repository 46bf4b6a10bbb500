package controllers

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A CRD is established once all gateways serve its last state, or after servedTimeout.
func TestEstablishedOnceServed(t *testing.T) {
	crd := func(name string, revision int, established apiextensionsv1.ConditionStatus) any {
		return &apiextensionsv1.CustomResourceDefinition{
			ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), ResourceVersion: strconv.Itoa(revision)},
			Spec: apiextensionsv1.CustomResourceDefinitionSpec{
				Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{Name: "v1", Served: name != "unserved"}},
			},
			Status: apiextensionsv1.CustomResourceDefinitionStatus{
				Conditions: []apiextensionsv1.CustomResourceDefinitionCondition{
					{Type: apiextensionsv1.NamesAccepted, Status: apiextensionsv1.ConditionTrue},
					{Type: apiextensionsv1.Established, Status: established},
				},
			},
		}
	}
	synctest.Test(t, func(t *testing.T) {
		served, reads := map[string]int64{}, 0
		var readErr error
		var established []string
		s := newServedCRDs(func(context.Context) (map[string]int64, error) { reads++; return served, readErr },
			func(name string) { established = append(established, name) })
		expect := func(want ...string) {
			t.Helper()
			synctest.Wait()
			if !slices.Equal(established, want) {
				t.Errorf("established: %q, not %q", established, want)
			}
		}
		go s.run(t.Context())
		s.changed(crd("a", 1, apiextensionsv1.ConditionFalse))
		time.Sleep(2 * servedPeriod)
		expect()
		served["a"] = 1
		s.changed(crd("a", 2, apiextensionsv1.ConditionFalse))
		time.Sleep(2 * servedPeriod)
		expect()
		served["a"] = 3
		time.Sleep(2 * servedPeriod)
		expect("a")
		s.changed(crd("a", 4, apiextensionsv1.ConditionTrue))
		time.Sleep(servedTimeout)
		before := reads
		time.Sleep(servedTimeout)
		expect("a")
		if reads != before {
			t.Error("the reports are read although no CRD waits")
		}
		readErr = errors.New("etcd is down")
		s.changed(crd("b", 5, apiextensionsv1.ConditionFalse))
		time.Sleep(servedTimeout / 2)
		s.changed(crd("b", 6, apiextensionsv1.ConditionFalse))
		time.Sleep(servedTimeout/2 - servedPeriod)
		expect("a")
		time.Sleep(servedPeriod + 2*maxServedPeriod)
		expect("a", "b")
		s.changed(crd("unserved", 7, apiextensionsv1.ConditionFalse)) // no gateway will serve it
		expect("a", "b", "unserved")
	})
}
