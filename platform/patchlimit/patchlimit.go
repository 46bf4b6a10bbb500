// Package patchlimit limits the copy operations of JSON Patches in every process that imports it.
//
// A JSON Patch of a kilobyte can double its document with each copy operation. The json-patch library has no limit
// unless a program sets one. kube-apiserver sets the limit in genericapiserver.Config.New (JSONPatchMaxCopyBytes). The
// registry applies patches of clients, and admission applies patches of mutating webhooks and policies, so both import
// the package.
package patchlimit

import jsonpatch "gopkg.in/evanphx/json-patch.v4"

// maxCopyBytes is how many bytes the copy operations of one patch may add to a document in total. A patch over the
// limit fails with an AccumulatedCopySizeError. The value is kube-apiserver's.
const maxCopyBytes = 3 << 20

func init() { jsonpatch.AccumulatedCopySizeLimit = maxCopyBytes }
